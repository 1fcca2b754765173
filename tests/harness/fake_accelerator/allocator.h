// Memory of the fake accelerator, with the caching semantics of LibTorch's CUDA allocator.
//
// A block belongs to the stream that was current when it was allocated. Freed, it is at once free
// for that stream's next allocation of its size, though work that reads it may still be queued,
// there in order, elsewhere unprotected. After record_stream() it is free once those streams have
// come to where they were when it was freed.
//
// Lifetime: until the process ends. Threads: any.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace zeropage::testing {

c10::Allocator* fake_allocator();

// The device that owns an address inside one of its blocks.
c10::Device fake_device_of(const void* data);

void record_on_fake_stream(const c10::DataPtr& data, c10::Stream stream);

}  // namespace zeropage::testing
