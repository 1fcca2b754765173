// Threads of our own for the optimizer's work on the host, each pinned to a core: a oneTBB arena
// beside LibTorch's OpenMP threads, so that a step and a backward share no pool and, with disjoint
// core sets, no core.
//
//   offload::WorkerPool pool({.cores = memory::Machine::here().core_sets(ranks)[rank]});
//   const offload::WorkerPoolScope scope(pool);
//   offload::fused_step(...);                       // on the pool
//
// The loops are static: thread i has part i, though a thread that wakes late may find its part
// taken by another. Results must not depend on who computes what.
// In a part the memory ledger and its kind, the floating-point environment (denormals, rounding)
// and the current pool are the caller's; LibTorch's own parallel loops run serially there.
// Lifetime: outlives its scopes and calls. Made after a fork, not before one.
// Threads: any may call, several at once; they then share the pool's. While the calling thread
// takes part it is pinned too.
// Throws c10::Error for options, std::system_error where the system does not pin.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "device/topology.h"

namespace zeropage::optim {

enum class Pinning : uint8_t { kToCores, kNone };

struct WorkerPoolOptions {
  // Where the threads run: thread i on core i modulo the set's size. Default:
  // device::own_core_set(), this process's part of the machine.
  std::optional<device::CoreSet> cores;
  // The calling one included. 0: one a core. More than the process has cores makes them share.
  int threads = 0;
  // kNone leaves them to the scheduler, which may run them beside LibTorch's.
  Pinning pinning = Pinning::kToCores;
};

class WorkerPool {
 public:
  explicit WorkerPool(const WorkerPoolOptions& options = {});
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int threads() const;
  const device::CoreSet& cores() const;

  // Calls body(begin, end) for min(threads, numel / grain, rounded up) parts of [0, numel), and
  // returns when all have ended; then rethrows what the first of them to fail threw. A body may
  // call this again, of this or of another pool. Takes some 6 us where there is more than one
  // part.
  void parallel_for(int64_t numel, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct Arena;
  const std::unique_ptr<Arena> arena_;
};

// While it lives, this folder's loops that the calling thread starts run on that pool. Scopes of a
// thread end in reverse order.
class WorkerPoolScope {
 public:
  explicit WorkerPoolScope(WorkerPool& pool);
  ~WorkerPoolScope();
  WorkerPoolScope(const WorkerPoolScope&) = delete;
  WorkerPoolScope& operator=(const WorkerPoolScope&) = delete;

  // The calling thread's; null: LibTorch's intra-op threads.
  static WorkerPool* current();

 private:
  WorkerPool* const before_;
};

}  // namespace zeropage::optim
