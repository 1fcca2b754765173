// Actions of all ranks in an order that their messages allow.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "zeropage/schedule.h"

namespace zeropage::pipeline {

// Calls try_action(rank, index) for each rank's next action, which does it, or returns false while its message was not sent; a rank is
// tried again when a message for it was. Returns how many actions each rank came to: all of them, or there is a deadlock.
std::vector<size_t> walk(const parallel::ActionLists& lists,
                         const std::function<bool(int rank, size_t index)>& try_action);

}  // namespace zeropage::pipeline
