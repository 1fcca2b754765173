// What carries the bytes between ranks, and in which order they are added. All but kNccl with kFast
// give the same bits.
#pragma once

#include <cstdint>

namespace zeropage::comm {

enum class Transport : uint8_t {
  // Between accelerators NCCL if it is possible. Otherwise shared memory between the ranks of a host if it is
  // possible, and Gloo between others.
  kAuto,
  kGloo,    // TCP between all ranks
  kShared,  // shared memory; throws where it cannot be had
  kNccl,    // from CUDA device to CUDA device; throws where it cannot be had
};

constexpr const char* name(Transport transport) {
  constexpr const char* kNames[] = {"auto", "gloo", "shared", "nccl"};
  return kNames[static_cast<size_t>(transport)];
}

// The order of a sum over ranks where NCCL carries the bytes. With other transports it is always
// fixed.
enum class ReductionOrder : uint8_t {
  // NCCL's, which depends on sizes, ranks and links, in the precision of the tensor.
  kFast,
  // comm/reduction.h's. Costs a buffer as large as the largest tensor.
  kFixed,
};

constexpr const char* name(ReductionOrder order) {
  return order == ReductionOrder::kFast ? "fast" : "fixed";
}

}  // namespace zeropage::comm
