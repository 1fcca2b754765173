#include <utility>

#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"
#include "zeropage/distributed_data_parallel.h"

namespace zeropage {
namespace {

Collect exchange_collect(GradientReducer& reducer, Collect collect) {
  BackwardPlan plan = reducer.plan();
  const Collect before = std::exchange(plan.collect, collect);
  reducer.set_plan(plan);
  return before;
}

std::shared_ptr<GradientReducer> checked_reducer(const ShardedModel& sharded) {
  ZP_CHECK(!sharded.options.world_invariant,
           "no_sync(): adds up this rank's micro-batches before the ranks', but "
           "options.world_invariant adds up the ranks' first, for bits that do not depend on the "
           "split; run backward() without it");
  return sharded.reducer;
}

}  // namespace

NoSync::NoSync(const ShardedModel& sharded)
    : reducer_(checked_reducer(sharded)), before_(exchange_collect(*reducer_, Collect::kLocally)) {}

NoSync::~NoSync() {
  if (reducer_ != nullptr) exchange_collect(*reducer_, before_);
}

}  // namespace zeropage
