// What of a rank's pages leaves the device: where to, and what moves and updates it. Which pages leave is in
// the byte plan (zero/plan/byte_plan.h).
//
// Lifetime: shared by the pages, their gradients and their optimizers.
// Threads: the training thread, but for what its parts say.
#pragma once

#include <memory>
#include <string>

#include "offload/copy_engine.h"
#include "optim/worker_pool.h"
#include "zero/tiers/tier_storage.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage::zero {

class PageOffload {
 public:
  // Null where all stays on the device. Throws where the world, or the machine, cannot.
  static std::shared_ptr<PageOffload> make(const comm::World& world, const Options& options);

  bool offloads_parameters() const { return options_.parameters != memory::Tier::kDevice; }

  c10::Device device() const { return world_.device(); }

  // Storages of what the optimizer updates.
  TierStorage& values() { return *values_; }
  TierStorage& states() { return *states_; }
  TierStorage& gradients() { return *gradients_; }
  // Storage of sharded parameters; only where they leave the device.
  TierStorage& parameters() { return *parameters_; }
  // Buffers of the host.
  TierStorage& staging() { return *staging_; }
  offload::CopyEngine& copies() { return *copies_; }
  // What computes the steps.
  optim::WorkerPool& pool() { return *pool_; }

  // All that an update of the page needs: of values(), states() and parameters().
  void start_fetch_for_update(size_t page);
  void fetch_for_update(size_t page);
  void release_after_update(size_t page, TierStorage::Use use = TierStorage::Use::kWrite);
  // What of it parameters are written to.
  void fetch_values(size_t page);
  void release_values(size_t page, TierStorage::Use use = TierStorage::Use::kWrite);
  // Whether values have memory after the release too.
  bool values_stay() const { return values_->stays(); }

  // Buffers on the host through which what is on a disk passes; 0 before the first use.
  int64_t buffer_bytes() const;

  // Gives them back until they are used again.
  void release_buffers();

  // What the tier storages on disk did, in lines; "" for none.
  std::string describe() const;

  const OffloadOptions& options() const { return options_; }

 private:
  PageOffload(const comm::World& world, const Options& options);

  const OffloadOptions options_;
  const comm::World world_;
  std::unique_ptr<optim::WorkerPool> pool_;
  std::unique_ptr<offload::CopyEngine> copies_;
  std::unique_ptr<TierStorage> values_;
  std::unique_ptr<TierStorage> states_;
  std::unique_ptr<TierStorage> gradients_;
  std::unique_ptr<TierStorage> staging_;
  std::unique_ptr<TierStorage> parameters_;
};

}  // namespace zeropage::zero
