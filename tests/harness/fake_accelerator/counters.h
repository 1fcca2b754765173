// What FakeCounters are counted in.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace zeropage::testing {

struct LiveCounters {
  std::atomic<int64_t> host_syncs{0};
  std::atomic<int64_t> device_syncs{0};
  std::atomic<int64_t> record_stream{0};
  std::atomic<int64_t> launches{0};
  std::atomic<int64_t> bytes_to_host{0};
  std::atomic<int64_t> not_async{0};
};
LiveCounters& live_counters();

// Counts one launch of what has that name.
void count_launch(const std::string& what);

}  // namespace zeropage::testing
