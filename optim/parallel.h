// The loops of this folder over flat stretches, on whichever threads are theirs: those of the
// calling thread's current worker pool (optim/worker_pool.h), or, without one, LibTorch's
// intra-op threads.
#pragma once

#include <cstdint>
#include <functional>

namespace zeropage::optim {

// Calls body(begin, end) for disjoint parts of [0, numel), each of `grain` or more unless it is all
// there is; returns when all have returned, and rethrows what one of them threw. Threads: any; the
// calling one takes part.
void parallel_for(int64_t numel, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace zeropage::optim
