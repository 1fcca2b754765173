#include "zeropage/recompute.h"

#include <utility>

#include "zeropage/distributed_data_parallel.h"

namespace zeropage {

checkpointing::Recompute recompute(const DistributedDataParallelBase& model,
                                   checkpointing::RecomputeOptions options) {
  const comm::World& world = model.world();
  options.device = world.device().type();
  if (!options.agree && world.size() > 1) {
    options.agree = [world](const at::Tensor& decision) {
      const at::Tensor there = decision.to(world.device());
      world.communicator().broadcast(there, /*root=*/0, "the recompute plan").wait();
      decision.copy_(there);
    };
  }
  return checkpointing::Recompute(std::move(options));
}

}  // namespace zeropage
