// The calls of a ledger to what limits it: before a charge, and after each change. memory/memory_limit.cpp
// defines it, which knows the limits and includes this header and the ledger's.
#pragma once

#include <cstdint>
#include <mutex>

#include "zeropage/event_sink.h"

namespace zeropage::memory {

class Ledger;

// Throws c10::OutOfMemoryError where a limit of the ledger leaves no room in that account. lock: holds the
// ledger's mutex, and is unlocked before this throws.
void check_charge(const Ledger& ledger, std::unique_lock<std::mutex>& lock, Account account,
                  Kind kind, int64_t bytes);

// Keeps the change for errors about memory (memory/last_events.h). bytes: less than 0 where they were freed.
// block: tells live blocks apart; null for bytes that are charged by hand.
// REQUIRES: somebody limits the ledger or advises on it, and the caller holds its mutex.
void note_change(const Ledger& ledger, Account account, Kind kind, int64_t bytes,
                 const void* block);
// The same for bytes that are of another kind from here on.
void note_rename(const Ledger& ledger, Kind to, const void* block);

}  // namespace zeropage::memory
