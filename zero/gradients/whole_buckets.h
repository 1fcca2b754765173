// Gradients that every rank has whole, in their buckets, from the first gradient of a backward until they are zeroed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/gradient_memory.h"
#include "zero/gradients/micro_step_sums.h"

namespace zeropage::zero {

class WholeBuckets : public GradientBuckets {
 public:
  void begin_training(size_t page, const std::vector<size_t>& parameters) override;
  at::Tensor open(size_t page, Collect collect) override;
  at::Tensor reopen(size_t page) override { return bucket(page).hold(); }
  void let_go(size_t page) override { bucket(page).let_go(); }
  bool are_transient() const override { return false; }
  void close(size_t page, Backwards backwards) override;
  bool complete(size_t page) override;
  at::Tensor owned(size_t page) const override;
  void keep(size_t page, const std::vector<Range>& forgotten) override;
  void forget(size_t page) override;
  void skip(size_t page) override;
  void forget(size_t page, const Range& range) override;

 protected:
  WholeBuckets(std::shared_ptr<ParameterPages> pages, const Options& options);

  const ParameterPages& pages() const { return *pages_; }
  GradientMemory& bucket(size_t page) { return pages_of_gradients_[page].bucket; }
  // A new bucket of zeros, of a page that has none.
  void renew(size_t page);
  // What travels: the bucket, or for as long as it takes a copy of it in reduce_dtype.
  at::Tensor wire(size_t page);
  // The bucket has what wire() has become.
  void take_wire(size_t page);
  // Whether close() adds what is kept.
  bool adds_up(size_t page) const;
  // "the gradient of page "blocks.3"".
  std::string describe(size_t page) const;

 private:
  struct PageOfGradients {
    GradientMemory bucket;    // [padded_numel]
    at::Tensor wire;          // [padded_numel] in reduce_dtype, while that is reduced
    MicroStepSums kept;       // [owned numel]: of earlier backwards
    std::vector<Range> gaps;  // of the page: where no parameter that trains lies
  };

  at::Tensor make_bucket(size_t page) const;

  const std::shared_ptr<ParameterPages> pages_;
  std::vector<PageOfGradients> pages_of_gradients_;
};

// Every rank gets the whole mean, and p.grad() is the parameter's slot in the bucket: 2 (N-1)/N bytes a gradient byte on the wire.
class ReplicatedBuckets final : public WholeBuckets {
 public:
  ReplicatedBuckets(std::shared_ptr<ParameterPages> pages, const Options& options)
      : WholeBuckets(std::move(pages), options), slots_(*this) {}
  comm::Pending start_reduction(size_t page, comm::ReduceOp op) override;
  ReducedGradients& reduced() override { return slots_; }

 private:
  class Slots final : public ReducedGradients {
   public:
    explicit Slots(ReplicatedBuckets& gradients) : gradients_(gradients) {}
    bool is(size_t parameter, const at::Tensor& gradient) const override;
    at::Tensor of(size_t parameter) override;
    at::Tensor replaced(size_t parameter, const at::Tensor& gradient) override;
    void set_before_use(BeforeUse call) override;

   private:
    const PlacedParameter& placed(size_t parameter) const;

    ReplicatedBuckets& gradients_;
    // Marks of gradients, which a script may keep longer, have it too.
    std::shared_ptr<BeforeUse> before_use_;
  };

  Slots slots_;
};

}  // namespace zeropage::zero
