// The table of memory_profile: a row a step that was recorded.
#pragma once

#include <string>

#include <zeropage/profile.h>

namespace memory_profile {

// Rank 0's peak and its kinds, in MiB, and the time. REQUIRES: a rank.
std::string table(const zeropage::profile::Profile& profile);

}  // namespace memory_profile
