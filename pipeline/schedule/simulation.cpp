#include "pipeline/schedule/simulation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "pipeline/schedule/detail/walk.h"
#include "pipeline/schedule/message.h"
#include "pipeline/schedule/order.h"

namespace zeropage::pipeline {
namespace {

double checked_seconds(double seconds, const std::string& who) {
  if (!std::isfinite(seconds) || seconds < 0) {
    throw std::invalid_argument(who + ": expected seconds that are finite and not negative, got " +
                                std::to_string(seconds));
  }
  return seconds;
}

// The clocks of the ranks and of what passes between them.
class Clocks {
 public:
  Clocks(const parallel::ActionLists& lists, double transfer_s)
      : lists_(lists), transfer_s_(transfer_s), free_at_(static_cast<size_t>(lists.ranks()), 0) {}

  // When the rank can begin its next action; none while its message was not sent. Called again only where it is none.
  std::optional<double> ready_at(int rank, const parallel::Action& action) {
    const double free = free_at_[static_cast<size_t>(rank)];
    const auto message = received_by(lists_, rank, action);
    if (!message) return free;
    const auto arrival = arrivals_.extract(*message);
    if (arrival.empty()) return std::nullopt;
    return std::max(free, arrival.mapped());
  }

  void end(int rank, const parallel::Action& action, double end_s) {
    free_at_[static_cast<size_t>(rank)] = end_s;
    const auto message = sent_by(lists_, rank, action);
    if (!message) return;
    const int receiver = message->receiver(lists_);
    if (receiver == rank) {
      arrivals_[*message] = end_s;
      return;
    }
    double& link_free = link_free_at_[{message->what, rank, receiver}];
    link_free = std::max(link_free, end_s) + transfer_s_;
    arrivals_[*message] = link_free;
  }

 private:
  const parallel::ActionLists& lists_;
  double transfer_s_;
  std::vector<double> free_at_;                                         // [ranks]
  std::map<Message, double> arrivals_;                                  // that nobody has received
  std::map<std::tuple<Message::What, int, int>, double> link_free_at_;  // by sender and receiver
};

}  // namespace

double StageSeconds::of(parallel::ActionKind kind) const {
  switch (kind) {
    case parallel::ActionKind::kForward:
      return forward;
    case parallel::ActionKind::kBackward:
      return input_gradient + weight_gradient;
    case parallel::ActionKind::kInputGradient:
      return input_gradient;
    case parallel::ActionKind::kWeightGradient:
      break;
  }
  return weight_gradient;
}

SimulatedStep simulate(
    const parallel::ActionLists& lists,
    const std::function<double(int rank, const parallel::Action& action)>& seconds_of,
    double transfer_s) {
  check_order(lists);
  Clocks clocks(lists, checked_seconds(transfer_s, "the transfer of a message"));
  SimulatedStep step;
  step.timeline.resize(lists.of_rank.size());
  walk(lists, [&](int rank, size_t index) {
    const parallel::Action& action = lists.of_rank[static_cast<size_t>(rank)][index];
    const auto begin = clocks.ready_at(rank, action);
    if (!begin) return false;
    const double seconds = checked_seconds(
        seconds_of(rank, action),
        "the " + parallel::describe(action, lists.chunks) + " of rank " + std::to_string(rank));
    step.timeline[static_cast<size_t>(rank)].push_back({action, *begin, *begin + seconds});
    clocks.end(rank, action, *begin + seconds);
    return true;
  });
  step.makespan_s = makespan_s(step.timeline);
  step.bubble = parallel::bubble_fraction(step.timeline);
  step.peak_activations = peak_activations(lists);
  return step;
}

SimulatedStep simulate(const parallel::ActionLists& lists, const std::vector<StageSeconds>& stages,
                       double transfer_s) {
  if (stages.size() != 1 && static_cast<int>(stages.size()) != lists.stages()) {
    throw std::invalid_argument("simulation: expected the seconds of one stage, or of each of " +
                                std::to_string(lists.stages()) + ", got " +
                                std::to_string(stages.size()));
  }
  return simulate(
      lists,
      [&](int rank, const parallel::Action& action) {
        const auto stage = static_cast<size_t>(lists.stage(rank, action.chunk));
        return stages[stages.size() == 1 ? 0 : stage].of(action.kind);
      },
      transfer_s);
}

}  // namespace zeropage::pipeline
