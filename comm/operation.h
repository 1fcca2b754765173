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
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
};
inline constexpr size_t kOperationCount = 10;

constexpr const char* name(Operation operation) {
  constexpr std::array<const char*, kOperationCount> kNames = {
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "send/recv",
      "barrier",    "reduce",         "gather",     "scatter",   "all_to_all"};
  return kNames[static_cast<size_t>(operation)];
}

// Whether a rank may have all that it needs before every other has called: an end of it proves nothing about the
// others.
constexpr bool may_end_early(Operation operation) {
  return operation == Operation::kBroadcast || operation == Operation::kReduce ||
         operation == Operation::kGather || operation == Operation::kScatter;
}

}  // namespace zeropage::comm
