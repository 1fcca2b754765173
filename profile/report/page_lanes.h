// What became of each page over a step, as stretches of time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zeropage/profile.h"

namespace zeropage::profile {

enum class PageState : uint8_t { kSharded, kFetching, kResident, kReducing };
// "sharded".
const char* name(PageState state);

struct PageStretch {
  PageState state = PageState::kSharded;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// The stretches of the parameters follow each other. Those of the gradient's reductions come after them, and lie
// over them.
struct PageLane {
  std::string page;
  int64_t bytes = 0;  // of the whole page; 0: not known
  std::vector<PageStretch> stretches;
};

// Lanes of the pages that something happened to, in the order in which it first did. A page whose parameters are
// never fetched or evicted is whole at all times.
std::vector<PageLane> page_lanes(const RankProfile& rank, const StepProfile& step);

}  // namespace zeropage::profile
