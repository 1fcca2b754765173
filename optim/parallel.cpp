#include "optim/parallel.h"

#include <ATen/Parallel.h>

#include "optim/worker_pool.h"

namespace zeropage::optim {

void parallel_for(int64_t numel, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body) {
  if (WorkerPool* pool = WorkerPoolScope::current()) {
    pool->parallel_for(numel, grain, body);
  } else {
    at::parallel_for(0, numel, grain, body);
  }
}

}  // namespace zeropage::optim
