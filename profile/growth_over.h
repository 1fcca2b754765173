// Finds what calls of a function leave behind (profile/testing.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace zeropage::profile {

// Calls `step` once to let it make what stays, and then `steps` times, which must be 3 or more. Returns a line for
// everything that the calling thread's ledger holds more of after each of them, with its owner; "": nothing. Throws
// for fewer steps, and what `step` throws.
std::string growth_over(int64_t steps, const std::function<void()>& step);

}  // namespace zeropage::profile
