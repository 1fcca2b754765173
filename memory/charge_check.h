// Asked before a ledger that has a limit is charged. memory/memory_limit.cpp defines it, which knows the limits and
// includes this header and the ledger's.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include <c10/core/DeviceType.h>

namespace zeropage::memory {

class Ledger;
enum class Kind : uint8_t;

// Throws c10::OutOfMemoryError where a limit of the ledger leaves no room. device: none for what is offloaded to
// the host. lock: holds the ledger's mutex, and is unlocked before this throws.
void check_charge(const Ledger& ledger, std::unique_lock<std::mutex>& lock,
                  std::optional<c10::DeviceType> device, Kind kind, int64_t bytes);

}  // namespace zeropage::memory
