#include "tools/schedule_command.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "tools/schedule_picture.h"
#include "tools/state_words.h"
#include "zeropage/schedule.h"
#include "zeropage/schedule_fields.h"

namespace zeropage::tools {
namespace {

using namespace parallel;
using nlohmann::json;

constexpr int kMostPipelineRanks = 4096;
constexpr int kMostMicroBatches = 1 << 16;
constexpr int kMostChunks = 1024;
constexpr int64_t kMostActions = 8'000'000;  // about 1 GB while they are simulated
constexpr int64_t kMostBoxes = 20'000;
constexpr size_t kColumns = 79;

std::vector<std::string> schedule_words() {
  std::vector<std::string> words;
  for (const auto& known : words_of(std::type_identity<ScheduleKind>())) {
    words.emplace_back(known.word);
  }
  return words;
}

ScheduleKind kind_named(const std::string& word) {
  for (const auto& known : words_of(std::type_identity<ScheduleKind>())) {
    if (known.word == word) return known.value;
  }
  throw std::invalid_argument("unknown schedule " + word);
}

std::string whole_file(const std::string& name) {
  std::ifstream file(name, std::ios::binary);
  std::ostringstream text;
  if (file.is_open()) errno = 0;
  // An empty file gives nothing, which is no error of reading.
  if (!(text << file.rdbuf()) && errno != 0) {
    throw std::runtime_error(name + ": cannot be read: " + std::strerror(errno));
  }
  return text.str();
}

void write_file(const std::string& name, const std::string& text) {
  std::ofstream file(name, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw std::runtime_error(name + ": cannot be written: " + std::strerror(errno));
}

// What a run measured, and the step that its actions' own durations would make without any other delay.
struct Measured {
  TimedStep step;
  double makespan_s = 0;
  double simulated_s = 0;
};

Measured measured_from(const std::string& file, const ActionLists& lists,
                       std::string_view schedule) {
  TimedStep step = timed_step(whole_file(file), file);
  if (step.schedule != schedule) {
    throw std::invalid_argument(file + ": expected times of schedule " + std::string(schedule) +
                                ", got " + printable(step.schedule) + "; give --schedule");
  }
  check_times(step, lists, file);
  std::map<std::tuple<int, ActionKind, int, int>, double> seconds;
  for (size_t rank = 0; rank < step.timeline.size(); ++rank) {
    for (const auto& [action, begin_s, end_s] : step.timeline[rank]) {
      seconds[{static_cast<int>(rank), action.kind, action.chunk, action.micro_batch}] =
          end_s - begin_s;
    }
  }
  const pipeline::SimulatedStep simulated =
      pipeline::simulate(lists, [&](int rank, const Action& action) {
        return seconds.at({rank, action.kind, action.chunk, action.micro_batch});
      });
  const double whole = makespan_s(step.timeline);
  return {std::move(step), whole, simulated.makespan_s};
}

std::string number(double value, const char* format = "%.4g") {
  char digits[32];
  std::snprintf(digits, sizeof digits, format, value);
  return digits;
}

struct Summary {
  std::string title;
  double makespan_s = 0;
  double bubble = 0;
  std::vector<double> peaks;
};

// For --durations of a simulation with other numbers.
void print_means(const Timeline& timeline) {
  std::printf("an action takes on average:\n");
  const auto means = mean_seconds(timeline);
  for (size_t rank = 0; rank < means.size(); ++rank) {
    std::printf("  rank %zu:", rank);
    const char* between = " ";
    for (const auto& [kind, seconds] : means[rank]) {
      std::printf("%s%s %s s", between, std::string(name(kind)).c_str(), number(seconds).c_str());
      between = ", ";
    }
    std::printf("\n");
  }
}

json json_of_means(const Timeline& timeline) {
  json ranks = json::array();
  for (const auto& of_rank : mean_seconds(timeline)) {
    json& kinds = ranks.emplace_back(json::object());
    for (const auto& [kind, seconds] : of_rank) kinds[std::string(name(kind))] = seconds;
  }
  return ranks;
}

// Lines of 79 characters at most: "..., in micro-batches: rank 0 4, rank 1 3". Ranks that follow each other and hold as much are
// told together.
std::string activations_in_words(const std::vector<double>& peaks) {
  std::string text = "most activations held, in micro-batches:";
  size_t column = text.size();
  for (size_t rank = 0; rank < peaks.size();) {
    size_t next = rank + 1;
    while (next < peaks.size() && peaks[next] == peaks[rank]) ++next;
    std::string part = next - rank == 1
                           ? " rank " + std::to_string(rank)
                           : " ranks " + std::to_string(rank) + "-" + std::to_string(next - 1);
    part += " " + number(peaks[rank]) + (next < peaks.size() ? "," : "");
    if (column + part.size() > kColumns) {
      text += "\n ";
      column = 1;
    }
    text += part;
    column += part.size();
    rank = next;
  }
  return text;
}

void print_words(const Summary& summary, const std::optional<Measured>& measured) {
  std::printf("%s\n", summary.title.c_str());
  if (measured) {
    std::printf(
        "step: %s s measured; %s s simulated from the same actions, without any other delay (%s)\n",
        number(summary.makespan_s).c_str(), number(measured->simulated_s).c_str(),
        number(measured->makespan_s / measured->simulated_s, "%.3f").c_str());
  } else {
    std::printf("step: %s s simulated\n", number(summary.makespan_s).c_str());
  }
  std::printf("bubble: %s %% of the ranks' time\n", number(100 * summary.bubble, "%.1f").c_str());
  std::printf("%s\n", activations_in_words(summary.peaks).c_str());
  if (measured) print_means(measured->step.timeline);
}

}  // namespace

ScheduleCommand::ScheduleCommand(CLI::App& zp) {
  parser_ = zp.add_subcommand("schedule", "Simulate and draw a schedule of a pipeline");
  parser_->footer(
      "A measured step (--times) is compared with what its actions would take without any other "
      "delay.\n"
      "Example: zp schedule --pipeline 4 --micro-batches 8 --schedule 1f1b -o 1f1b.svg");
  parser_->add_option("--pipeline", ranks_, "Ranks of the pipeline")
      ->required()
      ->check(CLI::Range(1, kMostPipelineRanks))
      ->type_name("N");
  parser_->add_option("--micro-batches", micro_batches_, "Micro-batches of a step")
      ->required()
      ->check(CLI::Range(1, kMostMicroBatches))
      ->type_name("N");
  parser_->add_option("--schedule", schedule_, "gpipe, 1f1b, interleaved or zero-bubble [1f1b]")
      ->check(CLI::IsMember(schedule_words()))
      ->type_name("NAME");
  parser_->add_option("--chunks", chunks_, "Pieces of the model on each rank [interleaved: 2]")
      ->check(CLI::Range(1, kMostChunks))
      ->type_name("N");
  CLI::Option* const durations =
      parser_
          ->add_option("--durations", durations_,
                       "Seconds of a micro-batch's forward, input gradient and weight gradient "
                       "through all of a rank's layers [1,1,1]")
          ->delimiter(',')
          ->expected(3)
          ->check(CLI::Range(0.0, 1e6))
          ->type_name("F,I,W");
  CLI::Option* const transfer =
      parser_->add_option("--transfer", transfer_s_, "Seconds of a message between two ranks [0]")
          ->check(CLI::Range(0.0, 1e6))
          ->type_name("SECONDS");
  parser_->add_option("--times", times_file_, "Times of a step that a run measured, as JSON")
      ->excludes(durations, transfer)
      ->type_name("FILE.json");
  parser_->add_option("-o,--output", picture_file_, "Draw the step")->type_name("FILE.svg");
  parser_->add_flag("--json", json_, "One JSON object, with the times of all actions");
}

int ScheduleCommand::chunks() const {
  if (chunks_ > 0) return chunks_;
  return kind_named(schedule_) == ScheduleKind::kInterleaved ? 2 : 1;
}

pipeline::StageSeconds ScheduleCommand::seconds() const {
  const double part = chunks();
  return {durations_[0] / part, durations_[1] / part, durations_[2] / part};
}

int ScheduleCommand::run(const std::vector<std::string>& after_dashes) const {
  if (!after_dashes.empty()) throw std::invalid_argument("schedule takes no program");
  if (durations_[0] + durations_[1] + durations_[2] == 0) {
    throw std::invalid_argument("--durations: expected an action that takes time, got 0,0,0");
  }
  const int64_t actions = int64_t{3} * ranks_ * micro_batches_ * chunks();
  if (actions > kMostActions) {
    throw std::invalid_argument("expected at most " + std::to_string(kMostActions) +
                                " actions, got about " + std::to_string(actions) +
                                "; take fewer ranks, micro-batches or chunks");
  }
  if (!picture_file_.empty() && actions > kMostBoxes) {
    throw std::invalid_argument("a picture has room for " + std::to_string(kMostBoxes) +
                                " actions, got about " + std::to_string(actions) +
                                "; leave out --output, or take fewer micro-batches");
  }
  const auto schedule = make_schedule(kind_named(schedule_), chunks());
  const ActionLists lists = schedule->actions(ranks_, micro_batches_);
  std::optional<Measured> measured;
  if (!times_file_.empty()) measured = measured_from(times_file_, lists, schedule->name());
  const Timeline timeline = measured ? measured->step.timeline
                                     : pipeline::simulate(lists, {seconds()}, transfer_s_).timeline;
  const Summary summary{schedule_ + ", " + std::to_string(ranks_) + " ranks, " +
                            std::to_string(micro_batches_) + " micro-batches" +
                            (chunks() > 1 ? ", " + std::to_string(chunks()) + " chunks" : ""),
                        makespan_s(timeline), bubble_fraction(timeline), peak_activations(lists)};
  if (!picture_file_.empty()) {
    write_file(picture_file_, svg({summary.title + (measured ? ", measured" : ", simulated") +
                                       ": bubble " + number(100 * summary.bubble, "%.1f") + " %",
                                   chunks(), summary.peaks, timeline}));
  }
  if (json_) {
    json found = json::parse(to_json({schedule_, chunks(), timeline}));
    found["makespan_s"] = summary.makespan_s;
    found["bubble"] = summary.bubble;
    found["peak_activations"] = summary.peaks;
    found["measured"] = measured.has_value();
    if (measured) {
      found["simulated_makespan_s"] = measured->simulated_s;
      found["mean_seconds"] = json_of_means(timeline);
    }
    print_json(found);
  } else {
    print_words(summary, measured);
  }
  return 0;
}

}  // namespace zeropage::tools
