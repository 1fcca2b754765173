// What is measured: an operation on a tensor of a size.
#pragma once

#include <array>
#include <cstdint>

namespace collectives {

// Tensors are fp32.
inline constexpr int64_t kElementBytes = 4;

enum class Operation : uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };

inline constexpr std::array<const char*, 5> kOperationNames = {
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"};

constexpr const char* name(Operation operation) {
  return kOperationNames[static_cast<size_t>(operation)];
}

struct Case {
  Operation operation = Operation::kBarrier;
  // Size of the whole tensor on each rank, of which a slice is a rank's share; 0 for a barrier.
  int64_t bytes = 0;

  friend bool operator==(const Case&, const Case&) = default;
};

}  // namespace collectives
