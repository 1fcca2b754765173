// LibTorch's CPU allocator, wrapped so that every block is on a ledger (memory/ledger.h).
//
// Installed before main() in every program that has a ledger: `c10::SetCPUAllocator` with a priority
// above the default's. Each block carries a 64-byte header in front of its data (which stays 64-byte
// aligned): size, kind, ledger. The ledger counts the bytes that were asked for, as PyTorch's
// profiler does; headers are not counted.
#pragma once

#include <cstdint>

#include <c10/core/Allocator.h>

#include "memory/charged_block.h"

namespace zeropage::memory {

// Installs it; later calls do nothing.
bool observe_host_memory();

// Bytes that LibTorch's CPU allocator has handed out and not got back, counted apart from any
// ledger.
int64_t host_allocated_bytes();

// Gives the operating system what is free: idle mappings and the heap's free pages. For a program
// that holds much less than before.
void return_idle_memory();

// The block that LibTorch's CPU allocator handed out, or null for memory from elsewhere (from_blob,
// a page).
ChargedBlock* host_block_of(const c10::DataPtr& data);

}  // namespace zeropage::memory
