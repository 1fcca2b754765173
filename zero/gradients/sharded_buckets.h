// Gradients of which a rank keeps its shard: a page's bucket has memory from its first gradient to
// the end of its reduction, and the shard from there until it is zeroed, if it is on the device.
//
// Afterwards p.grad() is a sharded tensor (zero/gradients/readable_gradients.h).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "zero/gradients/accumulated_shard.h"
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/readable_gradients.h"
#include "zero/gradients/replica_reduction.h"
#include "zero/pages/shard_source.h"

namespace zeropage::zero {

class ShardedBuckets final : public GradientBuckets {
 public:
  ShardedBuckets(std::shared_ptr<ParameterPages> pages, const Options& options);

  void begin_training(size_t page, const std::vector<size_t>& parameters) override;
  at::Tensor open(size_t page, Collect collect) override;
  at::Tensor reopen(size_t page) override { return pages_of_gradients_[page].bucket.hold(); }
  void let_go(size_t page) override;
  bool are_transient() const override { return true; }
  comm::Pending start_reduction(size_t page, comm::ReduceOp op) override;
  void close(size_t page, Backwards backwards) override;
  void wait_closed(size_t page) override { replicas_.wait(page); }
  bool complete(size_t page) override;
  at::Tensor owned(size_t page) const override {
    const auto& owned = pages_of_gradients_[page].owned;
    return owned ? owned->values() : at::Tensor();
  }
  bool is_offloaded(size_t page) const override { return pages_->offloads_optimizer(page); }
  void before_write(size_t page) const override {
    if (is_offloaded(page)) pages_->page_offload()->gradients().before_write(page);
  }
  memory::Pending arrival(size_t page) const override {
    const auto& owned = pages_of_gradients_[page].owned;
    return owned ? owned->arrival() : memory::Pending();
  }
  ReducedGradients& reduced() override { return paged_; }
  void keep(size_t page, const std::vector<Range>& forgotten) override;
  void forget(size_t page) override;
  void skip(size_t page) override;
  void forget(size_t page, const Range& range) override;
  void note_reduced() override;

 private:
  struct PageOfGradients {
    GradientMemory bucket;                    // [padded_numel]; has none while closed
    std::unique_ptr<AccumulatedShard> owned;  // [shard_numel]; null for a page that does not train
    std::vector<Range> gaps;                  // of the page: where no parameter that trains lies
  };

  class Shards final : public ReadableGradients::Memory {
   public:
    explicit Shards(ShardedBuckets& gradients) : gradients_(gradients) {}
    GradientMemory* memory(size_t page) override;
    void renew(size_t page) override;
    void check_readable(size_t page) const override;

   private:
    ShardedBuckets& gradients_;
  };

  std::unique_ptr<AccumulatedShard> make_owned(size_t page) const;

  const std::shared_ptr<ParameterPages> pages_;
  const SumOrder order_;
  std::vector<PageOfGradients> pages_of_gradients_;
  ReplicaReduction replicas_;
  Shards shards_;
  ShardSource* const source_;  // owned by paged_
  ReadableGradients paged_;
  std::optional<size_t> leaving_;  // the page closed last, whose bucket may still be read
};

}  // namespace zeropage::zero
