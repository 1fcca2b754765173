// The operations of a communicator, as errors and figures name them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace zeropage::comm {

enum class Operation : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kPair,  // send or recv
  kBarrier,
};
inline constexpr size_t kOperationCount = 6;

constexpr const char* name(Operation operation) {
  constexpr std::array<const char*, kOperationCount> kNames = {
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "send/recv", "barrier"};
  return kNames[static_cast<size_t>(operation)];
}

}  // namespace zeropage::comm
