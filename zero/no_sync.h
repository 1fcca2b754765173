// While it lives, backward adds up gradients on this rank and does not average them: the first backward after it does, for
// all of them together. Made by DistributedDataParallel::no_sync() and ShardedOptimizer::no_sync().
//
// Lifetime: shares the reducer. Threads: the training thread.
#pragma once

#include <cstdint>
#include <memory>

namespace zeropage {

enum class Collect : uint8_t;
class GradientReducer;
struct ShardedModel;

class NoSync {
 public:
  // Throws where world_invariant, which adds up the ranks first.
  explicit NoSync(const ShardedModel& sharded);
  ~NoSync();
  NoSync(NoSync&&) = default;

 private:
  std::shared_ptr<GradientReducer> reducer_;  // null: moved from
  const Collect before_;
};

}  // namespace zeropage
