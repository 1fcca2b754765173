#include "pipeline/schedule/order.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

#include "pipeline/schedule/detail/walk.h"
#include "pipeline/schedule/message.h"

namespace zeropage::pipeline {
namespace {

std::string rank_words(int rank) {
  return "rank " + std::to_string(rank) + " of the pipeline";
}

std::string action_words(const parallel::ActionLists& lists, int rank, size_t index) {
  const parallel::Action& action = lists.of_rank[static_cast<size_t>(rank)][index];
  return "action " + std::to_string(index) + " (" + parallel::describe(action, lists.chunks) + ")";
}

[[noreturn]] void refuse_action(const parallel::ActionLists& lists, int rank, size_t index,
                                const std::string& words) {
  throw std::invalid_argument(rank_words(rank) + ", " + action_words(lists, rank, index) + ": " +
                              words);
}

// ---- Each rank by itself ----

// How far a micro-batch has come through a chunk.
enum class Passed : uint8_t { kNothing, kForward, kInputGradient, kAll };

Passed after(parallel::ActionKind kind) {
  switch (kind) {
    case parallel::ActionKind::kForward:
      return Passed::kForward;
    case parallel::ActionKind::kInputGradient:
      return Passed::kInputGradient;
    case parallel::ActionKind::kBackward:
    case parallel::ActionKind::kWeightGradient:
      break;
  }
  return Passed::kAll;
}

Passed needed_before(parallel::ActionKind kind) {
  switch (kind) {
    case parallel::ActionKind::kForward:
      return Passed::kNothing;
    case parallel::ActionKind::kBackward:
    case parallel::ActionKind::kInputGradient:
      return Passed::kForward;
    case parallel::ActionKind::kWeightGradient:
      break;
  }
  return Passed::kInputGradient;
}

std::string words_for(Passed passed) {
  switch (passed) {
    case Passed::kNothing:
      return "no action";
    case Passed::kForward:
      return "its forward";
    case Passed::kInputGradient:
      return "its input gradient";
    case Passed::kAll:
      break;
  }
  return "all of its backward";
}

void check_list(const parallel::ActionLists& lists, int rank) {
  const std::vector<parallel::Action>& actions = lists.of_rank[static_cast<size_t>(rank)];
  std::map<std::pair<int, int>, Passed> passed;
  for (size_t index = 0; index < actions.size(); ++index) {
    const parallel::Action& action = actions[index];
    if (action.chunk < 0 || action.chunk >= lists.chunks || action.micro_batch < 0 ||
        action.micro_batch >= lists.micro_batches) {
      refuse_action(lists, rank, index,
                    "expected one of " + std::to_string(lists.micro_batches) +
                        " micro-batches and of " + std::to_string(lists.chunks) +
                        " chunks, got micro-batch " + std::to_string(action.micro_batch) +
                        ", chunk " + std::to_string(action.chunk));
    }
    Passed& so_far = passed[{action.chunk, action.micro_batch}];
    if (so_far != needed_before(action.kind)) {
      refuse_action(lists, rank, index,
                    "expected " + words_for(needed_before(action.kind)) + " before it, got " +
                        words_for(so_far));
    }
    so_far = after(action.kind);
  }
  for (int chunk = 0; chunk < lists.chunks; ++chunk) {
    for (int m = 0; m < lists.micro_batches; ++m) {
      if (passed[{chunk, m}] == Passed::kAll) continue;
      throw std::invalid_argument(rank_words(rank) +
                                  ": expected a forward and a whole backward of micro-batch " +
                                  std::to_string(m) + ", chunk " + std::to_string(chunk) +
                                  ", got " + words_for(passed[{chunk, m}]));
    }
  }
}

// ---- The ranks together ----

// The messages of one kind from one rank to another.
using Link = std::tuple<Message::What, int, int>;

class Run {
 public:
  explicit Run(const parallel::ActionLists& lists) : lists_(lists) {}

  void to_the_end() {
    next_ = walk(lists_, [this](int rank, size_t index) { return step(rank, index); });
    for (int rank = 0; rank < lists_.ranks(); ++rank) {
      if (!done(rank)) throw std::invalid_argument("deadlock: " + circle_from(rank));
    }
  }

 private:
  const std::vector<parallel::Action>& actions(int rank) const {
    return lists_.of_rank[static_cast<size_t>(rank)];
  }
  size_t next(int rank) const { return next_[static_cast<size_t>(rank)]; }
  bool done(int rank) const { return next(rank) == actions(rank).size(); }
  Link link_of(const Message& message) const {
    return {message.what, message.sender(lists_), message.receiver(lists_)};
  }

  // Does an action, if its message is there.
  bool step(int rank, size_t index) {
    const parallel::Action& action = actions(rank)[index];
    if (const auto message = received_by(lists_, rank, action)) {
      std::deque<Message>& sent = links_[link_of(*message)];
      const auto found = std::find(sent.begin(), sent.end(), *message);
      if (found == sent.end()) return false;
      if (found != sent.begin()) {
        refuse_action(lists_, rank, index,
                      "its message comes behind that of micro-batch " +
                          std::to_string(sent.front().micro_batch) +
                          ", which is sent before it and received after it; receive them in the "
                          "order of sending");
      }
      sent.pop_front();
    }
    if (const auto message = sent_by(lists_, rank, action)) {
      links_[link_of(*message)].push_back(*message);
    }
    return true;
  }

  // Who waits for whom, from a rank that stands still, until a rank comes again or has ended.
  std::string circle_from(int rank) const {
    std::string words;
    for (std::set<int> seen; seen.insert(rank).second && !done(rank);) {
      const Message message = *received_by(lists_, rank, actions(rank)[next(rank)]);
      const int sender = message.sender(lists_);
      if (!words.empty()) words += "; ";
      words += rank_words(rank) + " waits in " + action_words(lists_, rank, next(rank)) +
               " for what rank " + std::to_string(sender) + " sends in " +
               sending_words(sender, message);
      rank = sender;
    }
    return words;
  }

  // The sender does send it: each rank's list is whole.
  std::string sending_words(int sender, const Message& message) const {
    size_t index = 0;
    while (sent_by(lists_, sender, actions(sender)[index]) != message) ++index;
    return "its " + action_words(lists_, sender, index);
  }

  const parallel::ActionLists& lists_;
  std::vector<size_t> next_;  // [ranks], of each rank's list
  std::map<Link, std::deque<Message>> links_;
};

}  // namespace

void check_order(const parallel::ActionLists& lists) {
  for (int rank = 0; rank < lists.ranks(); ++rank) check_list(lists, rank);
  Run(lists).to_the_end();
}

}  // namespace zeropage::pipeline
