#include "saving/detail/collective_errors.h"

#include <c10/util/Exception.h>

#include "zeropage/check.h"
#include "zeropage/saved_state.h"

namespace zeropage::saving {
namespace {

using nlohmann::json;
using state::StateError;

json told(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const StateError& caught) {
    return {{"error", caught.what()}, {"file", caught.file()}, {"offset", caught.offset()}};
  } catch (const std::exception& caught) {
    return {{"error", memory::message_of(caught)}, {"file", ""}, {"offset", 0}};
  }
}

// Text that is no UTF-8, such as a path, is told with marks in its place.
std::string error_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

json first_error(const std::vector<json>& by_rank) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (!by_rank[rank].contains("error")) continue;
    json error = by_rank[rank];
    if (by_rank.size() > 1) {
      error["error"] = "rank " + std::to_string(rank) + ": " + error["error"].get<std::string>();
    }
    return error;
  }
  return nullptr;
}

}  // namespace

std::exception_ptr error_of(const std::function<void()>& action) {
  try {
    action();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

json settle(const comm::World& world, const std::string& topic, const json& own,
            const std::exception_ptr& error, const DecideJson& decide) {
  const json mine = error ? told(error) : json{{"own", own}};
  const std::string text =
      world.settle(topic, error_text(mine), [&](const std::vector<std::string>& texts) {
        std::vector<json> by_rank;
        for (const std::string& text : texts) by_rank.push_back(json::parse(text));
        json answer = first_error(by_rank);
        if (!answer.is_null()) return error_text(answer);
        for (json& of_rank : by_rank) of_rank = json(of_rank.at("own"));
        const std::exception_ptr failed = error_of([&] { answer = {{"answer", decide(by_rank)}}; });
        return error_text(failed ? told(failed) : answer);
      });
  const json answer = json::parse(text);
  if (answer.contains("error")) {
    throw StateError::as_said(answer["error"], answer["file"], answer["offset"]);
  }
  return answer.at("answer");
}

void throw_alike(const comm::World& world, const std::string& topic,
                 const std::exception_ptr& error) {
  settle(world, topic, nullptr, error, [](const auto&) { return nullptr; });
}

}  // namespace zeropage::saving
