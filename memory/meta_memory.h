// Tensors on the meta device on the ledgers (zeropage/ledger.h): the bytes that they would have elsewhere.
//
// LibTorch gives such a tensor sizes and no memory. Once this is observed, each of its storages is
// charged as a block of the host is, to the ledger and the kind of the thread that makes it, on the
// ledger's account of c10::kMeta. So code that runs on meta tensors leaves there what it would hold.
// Not counted: storages that were made before, what a storage grows by in resize_(), and what
// operators take for themselves while they compute.
//
// Threads: any.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>
#include <c10/core/Allocator.h>

#include "memory/charged_block.h"

namespace zeropage::memory {

// From here on. Once a process; later calls do nothing.
void observe_meta_memory();

// The block of a storage on the meta device, or null for one that is not observed.
ChargedBlock* meta_block_of(const c10::DataPtr& data);

// On the meta device, [numel]: stands for memory in a tier away from the device, where it is charged
// while its storage lives. tier: not kDevice.
at::Tensor meta_tensor_in(Tier tier, int64_t numel, at::ScalarType dtype, Kind kind);

}  // namespace zeropage::memory
