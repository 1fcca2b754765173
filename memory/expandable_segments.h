// How LibTorch's CUDA caching allocator gets memory from a device: in segments that grow, which is our default, or in
// segments of fixed size, which is LibTorch's.
//
// A segment of fixed size is taken for one request and rounded up to 2 MiB, and what is freed in it serves requests
// that are no larger. So each page's buffers lose up to 2 MiB, and the storages of a module that was moved to the
// device leave holes that its pages do not fit into. Segments that grow hold all requests of a stream side by side.
// docs/memory.md has figures.
//
// Who sets PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, to whatever, has what that says:
//   PYTORCH_ALLOC_CONF=expandable_segments:False ./train
// The same holds for a program that called LibTorch's setAllocatorSettings() before.
//
// Threads: any.
#pragma once

namespace zeropage::memory {

// From here on, unless somebody set something else, or a device of this process cannot map memory by itself. What was
// allocated before stays where it is.
void prefer_expandable_segments();

// Whether the CUDA allocator of this process uses them now.
bool uses_expandable_segments();

}  // namespace zeropage::memory
