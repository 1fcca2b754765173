// A model in a low precision that the host's processor has no instructions for: right, and slow.
#pragma once

#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "zero/layout/shard_layout.h"
#include "zeropage/world.h"

namespace zeropage::zero {

// What the processor computes by itself besides fp32 and fp64.
struct HostPrecisions {
  bool bfloat16 = false;
  bool half = false;

  static HostPrecisions of_this_host();
};

// A line about the first of the dtypes that the processor does not compute; "" where it computes all.
std::string words_on_slow_precision(const std::vector<c10::ScalarType>& dtypes,
                                    const HostPrecisions& host);

// Says so on stderr, once a process, on rank 0 of ranks that train on their host.
void tell_of_slow_precision(const comm::World& world, const std::vector<PageLayout>& layouts);

}  // namespace zeropage::zero
