#include <utility>

#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"
#include "zeropage/distributed_data_parallel.h"

namespace zeropage {
namespace {

std::shared_ptr<zero::GradientReducer> checked_reducer(const zero::ShardedModel& sharded) {
  ZP_CHECK(!sharded.options.world_invariant,
           "no_sync(): adds up this rank's micro-batches before the ranks', but "
           "options.world_invariant adds up the ranks' first, for bits that do not depend on the "
           "split; run backward() without it");
  return sharded.reducer;
}

}  // namespace

NoSync::NoSync(const zero::ShardedModel& sharded) : reducer_(checked_reducer(sharded)) {
  reducer_->begin_no_sync();
}

NoSync& NoSync::operator=(NoSync&& other) noexcept {
  NoSync taken(std::move(other));
  std::swap(reducer_, taken.reducer_);
  return *this;
}

void NoSync::end() {
  if (reducer_ != nullptr) std::exchange(reducer_, nullptr)->end_no_sync();
}

}  // namespace zeropage
