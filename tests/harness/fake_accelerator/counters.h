// What FakeCounters are counted in.
#pragma once

#include <atomic>
#include <cstdint>

namespace zeropage::testing {

struct LiveCounters {
  std::atomic<int64_t> host_syncs{0};
  std::atomic<int64_t> device_syncs{0};
  std::atomic<int64_t> record_stream{0};
  std::atomic<int64_t> tasks{0};
  std::atomic<int64_t> not_async{0};
};
LiveCounters& live_counters();

}  // namespace zeropage::testing
