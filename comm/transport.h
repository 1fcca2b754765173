// What carries the bytes between ranks. All give the same bits.
#pragma once

#include <cstdint>

namespace zeropage::comm {

enum class Transport : uint8_t {
  kAuto,    // shared memory between the ranks of a host, Gloo between hosts
  kGloo,    // TCP between all ranks
  kShared,  // shared memory; throws where it cannot be had or ranks are on several hosts
};

}  // namespace zeropage::comm
