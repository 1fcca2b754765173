// Gradients whose buckets every rank has whole, while only the rank's shard of a bucket becomes the mean: (N-1)/N
// bytes on the wire.
//
// Elsewhere the bucket keeps what this rank's own backward left. So p.grad() is a sharded tensor
// (zero/gradients/readable_gradients.h) here too: an operator on it brings the other ranks' shards of the
// mean into the bucket, in place, which costs no memory.
#pragma once

#include <memory>
#include <vector>

#include "zero/gradients/readable_gradients.h"
#include "zero/gradients/replica_reduction.h"
#include "zero/gradients/whole_buckets.h"

namespace zeropage::zero {

class OwnedBuckets final : public WholeBuckets {
 public:
  OwnedBuckets(std::shared_ptr<ParameterPages> pages, const Options& options);

  void begin_training(size_t page, const std::vector<size_t>& parameters) override;
  comm::Pending start_reduction(size_t page, comm::ReduceOp op) override;
  void close(size_t page, Backwards backwards) override;
  void wait_closed(size_t page) override { replicas_.wait(page); }
  bool complete(size_t page) override;
  ReducedGradients& reduced() override { return paged_; }
  void keep(size_t page, const std::vector<Range>& forgotten) override;
  void forget(size_t page) override;
  void skip(size_t page) override;
  using WholeBuckets::forget;
  void note_reduced() override { replicas_.wait(); }

 private:
  class BucketSource;

  class Buckets final : public ReadableGradients::Memory {
   public:
    explicit Buckets(OwnedBuckets& gradients) : gradients_(gradients) {}
    GradientMemory* memory(size_t page) override { return &gradients_.bucket(page); }
    void renew(size_t page) override { gradients_.renew(page); }
    void check_readable(size_t page) const override { gradients_.replicas_.check_complete(page); }

   private:
    OwnedBuckets& gradients_;
  };

  ReplicaReduction replicas_;
  Buckets buckets_;
  BucketSource* source_;  // owned by paged_
  ReadableGradients paged_;
};

}  // namespace zeropage::zero
