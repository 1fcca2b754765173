// Page-locked host memory of the fake accelerator, from LibTorch's own cache of such memory over the fake's streams and events.
//
// A freed block is given out again at once, though a copy that reads or writes it may still be queued, unless record_pinned_use()
// told of a copy: LibTorch's copy kernels tell the tensor's address and the context of its storage. Blocks begin at a multiple of 512, as
// CUDA's small ones do, and hold NaN when they are given out.
//
// Lifetime: memory is never unmapped, so a copy that comes too late reads and writes what others have now. Threads: any.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace zeropage::testing {

c10::Allocator* fake_pinned_allocator();
// Whether the address lies in page-locked memory, used or free.
bool is_fake_pinned(const void* data);
// A copy on that stream uses the tensor at that address, whose storage has that context. False if the cache knows neither.
bool record_pinned_use(const void* data, void* context, c10::Stream stream);

}  // namespace zeropage::testing
