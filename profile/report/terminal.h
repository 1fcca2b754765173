// A profile for a terminal: the bytes over a step as lines of blocks, the table, and what was waited for.
#pragma once

#include <string>
#include <vector>

#include "zeropage/profile.h"

namespace zeropage::profile {

// "▁▃█": a block a value, of eight heights up to `most`.
std::string sparkline(const std::vector<int64_t>& values, int64_t most);

// other: a run to compare with; null: none.
std::string terminal_report(const Profile& profile, const Profile* other = nullptr);

}  // namespace zeropage::profile
