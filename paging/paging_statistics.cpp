#include "zeropage/detail/paging_statistics.h"

namespace zeropage::memory {

PagingStatistics& PagingStatistics::operator+=(const PagingStatistics& other) {
  faults += other.faults;
  prefetched += other.prefetched;
  evictions += other.evictions;
  bytes_gathered += other.bytes_gathered;
  wait_seconds += other.wait_seconds;
  return *this;
}

PagingStatistics PagingStatistics::operator-(const PagingStatistics& earlier) const {
  return {faults - earlier.faults, prefetched - earlier.prefetched, evictions - earlier.evictions,
          bytes_gathered - earlier.bytes_gathered, wait_seconds - earlier.wait_seconds};
}

}  // namespace zeropage::memory
