#include "pipeline/schedule/detail/walk.h"

#include <deque>
#include <numeric>

#include "pipeline/schedule/message.h"

namespace zeropage::pipeline {

std::vector<size_t> walk(const parallel::ActionLists& lists,
                         const std::function<bool(int rank, size_t index)>& try_action) {
  std::vector<size_t> next(lists.of_rank.size(), 0);
  std::deque<int> to_try(lists.of_rank.size());
  std::iota(to_try.begin(), to_try.end(), 0);
  while (!to_try.empty()) {
    const int rank = to_try.front();
    to_try.pop_front();
    const std::vector<parallel::Action>& actions = lists.of_rank[static_cast<size_t>(rank)];
    size_t& index = next[static_cast<size_t>(rank)];
    while (index < actions.size() && try_action(rank, index)) {
      const auto message = sent_by(lists, rank, actions[index]);
      ++index;
      if (message) to_try.push_back(message->receiver(lists));
    }
  }
  return next;
}

}  // namespace zeropage::pipeline
