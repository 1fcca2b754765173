// What carries the bytes between ranks. All give the same bits.
#pragma once

#include <cstdint>

namespace zeropage::comm {

enum class Transport : uint8_t {
  kAuto,    // shared memory between the ranks of a host where it can be had, Gloo between others
  kGloo,    // TCP between all ranks
  kShared,  // shared memory; throws where it cannot be had
};

constexpr const char* name(Transport transport) {
  constexpr const char* kNames[] = {"auto", "gloo", "shared"};
  return kNames[static_cast<size_t>(transport)];
}

}  // namespace zeropage::comm
