#include <array>
#include <cmath>
#include <stdexcept>
#include <utility>

#include <nlohmann/json.hpp>

#include "zeropage/schedule.h"

namespace zeropage::parallel {
namespace {

using nlohmann::json;

constexpr std::array kKinds = {ActionKind::kForward, ActionKind::kBackward,
                               ActionKind::kInputGradient, ActionKind::kWeightGradient};

// What is read, with the place for errors.
class TimesReader {
 public:
  explicit TimesReader(std::string who) : who_(std::move(who)) {}

  [[noreturn]] void refuse(const std::string& place, const std::string& words) const {
    throw std::invalid_argument(who_ + (place.empty() ? "" : ", " + place) + ": " + words);
  }

  const json& member(const json& object, const char* key, const std::string& place) const {
    if (!object.is_object() || !object.contains(key)) {
      refuse(place, "expected an object with \"" + std::string(key) + "\"");
    }
    return object[key];
  }

  int whole_number(const json& object, const char* key, const std::string& place) const {
    const json& value = member(object, key, place);
    if (!value.is_number_integer() || value < 0 || value > 1'000'000) {
      refuse(place, "\"" + std::string(key) +
                        "\": expected a whole number from 0 to 1000000, got " + value.dump());
    }
    return value.get<int>();
  }

  double seconds(const json& object, const char* key, const std::string& place) const {
    const json& value = member(object, key, place);
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0) {
      refuse(place,
             "\"" + std::string(key) + "\": expected seconds, at least 0, got " + value.dump());
    }
    return value.get<double>();
  }

  ActionKind kind(const json& object, const std::string& place) const {
    const json& value = member(object, "kind", place);
    for (const ActionKind kind : kKinds) {
      if (value == name(kind)) return kind;
    }
    refuse(place,
           "\"kind\": expected \"forward\", \"backward\", \"input gradient\" or \"weight "
           "gradient\", got " +
               value.dump());
  }

  TimedAction action(const json& object, const std::string& place) const {
    return {{kind(object, place), whole_number(object, "chunk", place),
             whole_number(object, "micro_batch", place)},
            seconds(object, "begin_s", place),
            seconds(object, "end_s", place)};
  }

 private:
  std::string who_;
};

std::string place_of(size_t rank, size_t index) {
  return "rank " + std::to_string(rank) + ", action " + std::to_string(index);
}

void check_rank(const std::vector<TimedAction>& timed, const std::vector<Action>& actions,
                size_t rank, int chunks, const TimesReader& reader) {
  if (timed.size() != actions.size()) {
    reader.refuse("rank " + std::to_string(rank), "expected " + std::to_string(actions.size()) +
                                                      " actions, got " +
                                                      std::to_string(timed.size()));
  }
  double before = 0;
  for (size_t index = 0; index < timed.size(); ++index) {
    const TimedAction& each = timed[index];
    if (each.action != actions[index]) {
      reader.refuse(place_of(rank, index), "expected the " + describe(actions[index], chunks) +
                                               ", got the " + describe(each.action, chunks));
    }
    if (each.begin_s < before || each.end_s < each.begin_s) {
      reader.refuse(place_of(rank, index),
                    "expected it to begin when the action before it has ended, and to end after "
                    "that, got " +
                        std::to_string(each.begin_s) + " s to " + std::to_string(each.end_s) +
                        " s");
    }
    before = each.end_s;
  }
}

}  // namespace

std::string to_json(const TimedStep& step) {
  json ranks = json::array();
  for (const auto& actions : step.timeline) {
    json of_rank = json::array();
    for (const auto& [action, begin_s, end_s] : actions) {
      of_rank.push_back({{"kind", name(action.kind)},
                         {"chunk", action.chunk},
                         {"micro_batch", action.micro_batch},
                         {"begin_s", begin_s},
                         {"end_s", end_s}});
    }
    ranks.push_back(std::move(of_rank));
  }
  return json{{"schedule", step.schedule}, {"chunks", step.chunks}, {"ranks", std::move(ranks)}}
      .dump();
}

TimedStep timed_step(const std::string& text, const std::string& who) {
  const TimesReader reader(who);
  const json whole = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (whole.is_discarded()) reader.refuse("", "expected JSON, got something else");
  const json& schedule = reader.member(whole, "schedule", "");
  if (!schedule.is_string()) {
    reader.refuse("", "\"schedule\": expected a schedule's name, got " + schedule.dump());
  }
  TimedStep step{schedule.get<std::string>(), reader.whole_number(whole, "chunks", ""), {}};
  const json& ranks = reader.member(whole, "ranks", "");
  if (!ranks.is_array()) reader.refuse("", "\"ranks\": expected a list for each rank");
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].is_array()) {
      reader.refuse("rank " + std::to_string(rank), "expected a list of actions");
    }
    std::vector<TimedAction>& actions = step.timeline.emplace_back();
    for (size_t index = 0; index < ranks[rank].size(); ++index) {
      actions.push_back(reader.action(ranks[rank][index], place_of(rank, index)));
    }
  }
  return step;
}

void check_times(const TimedStep& step, const ActionLists& lists, const std::string& who) {
  const TimesReader reader(who);
  if (step.chunks != lists.chunks) {
    reader.refuse("", "expected " + std::to_string(lists.chunks) + " chunks, got " +
                          std::to_string(step.chunks));
  }
  if (step.timeline.size() != lists.of_rank.size()) {
    reader.refuse("", "expected " + std::to_string(lists.ranks()) + " ranks, got " +
                          std::to_string(step.timeline.size()));
  }
  for (size_t rank = 0; rank < step.timeline.size(); ++rank) {
    check_rank(step.timeline[rank], lists.of_rank[rank], rank, lists.chunks, reader);
  }
}

}  // namespace zeropage::parallel
