// What a run holds more of at the end of each step: a leak, with who allocated it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zeropage/profile.h"

namespace zeropage::profile {

struct Growth {
  int rank = 0;
  std::string account;
  std::string kind;
  std::string owner;  // "": not known
  std::string page;   // "": of none
  int64_t first_bytes = 0;
  int64_t last_bytes = 0;
  int64_t steps = 0;  // from the one to the other

  int64_t bytes_per_step() const { return (last_bytes - first_bytes) / steps; }
  // "rank 1 holds 4096 bytes more of activation at the end of each step, allocated by aten::mm for page ..."
  std::string to_string() const;
};

// What grew in every step after the first one that was recorded, which may still build up what stays, such
// as an optimizer's states. Fewer than three steps tell nothing. The most first.
std::vector<Growth> growth_of(const Profile& profile);

}  // namespace zeropage::profile
