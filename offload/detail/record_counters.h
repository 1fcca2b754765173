// What the records of a file cost so far.
//
// Lifetime: shared with Pendings and records, which may outlive the file.
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "offload/nvme_options.h"

namespace zeropage::offload::detail {

class RecordCounters {
 public:
  // change: of the statistics so far.
  template <typename Change>
  void count(const Change& change) {
    const std::lock_guard lock(mutex_);
    change(statistics_);
  }

  NvmeStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    NvmeStatistics statistics = statistics_;
    statistics.waited_seconds = static_cast<double>(waited_nanoseconds) * 1e-9;
    statistics.demoted_bytes = host_bytes;
    return statistics;
  }

  std::atomic<int64_t> waited_nanoseconds{0};
  std::atomic<int64_t> host_bytes{0};  // of records that live in host memory

 private:
  mutable std::mutex mutex_;
  NvmeStatistics statistics_;  // guarded by mutex_
};

}  // namespace zeropage::offload::detail
