// How often pages came and went, and how long operators waited for them.
#pragma once

#include <cstdint>

namespace zeropage::memory {

struct PagingStatistics {
  int64_t faults = 0;          // pages that an operator had to ask for
  int64_t prefetched = 0;      // pages brought before an operator asked for them, and then used
  int64_t evictions = 0;       // pages that went
  int64_t bytes_gathered = 0;  // of all pages that came
  double wait_seconds = 0;     // that operators waited for pages

  PagingStatistics& operator+=(const PagingStatistics& other);
  PagingStatistics operator-(const PagingStatistics& earlier) const;
};

}  // namespace zeropage::memory
