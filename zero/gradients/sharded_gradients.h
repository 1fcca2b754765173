// Gradients of which a rank keeps its shard: a page's bucket has memory from its first gradient to
// the end of its reduction.
//
// Afterwards p.grad() is a sharded tensor (zero/gradients/paged_gradients.h).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/paged_gradients.h"
#include "zero/gradients/shard_gradient.h"
#include "zero/pages/shard_source.h"

namespace zeropage {

class ShardedGradients final : public GradientBuckets {
 public:
  ShardedGradients(std::shared_ptr<ParameterPages> pages, const Options& options);

  void begin_training(size_t page, const std::vector<size_t>& parameters) override;
  const at::Tensor& open(size_t page, Collect collect) override;
  bool are_transient() const override { return true; }
  comm::Pending start_reduction(size_t page, comm::ReduceOp op) override;
  void close(size_t page, Backwards backwards) override;
  bool complete(size_t page) override;
  const at::Tensor& owned(size_t page) const override {
    return pages_of_gradients_[page].owned->values();
  }
  bool is_offloaded(size_t page) const override { return pages_->offloads_optimizer(page); }
  memory::Pending arrival(size_t page) const override {
    return pages_of_gradients_[page].owned->arrival();
  }
  const at::Tensor& reduced_gradient(size_t parameter) const override {
    return paged_.of(parameter);
  }
  void keep(size_t page, const std::vector<Range>& forgotten) override;
  void forget(size_t page) override;
  void skip(size_t page) override;
  void forget(size_t page, const Range& range) override;
  void replace(size_t parameter, const at::Tensor& gradient) override;
  void gather(const std::vector<size_t>& parameters, memory::Pins& pins) override;
  void note_reduced() override;
  void take_over_changes() override;

 private:
  struct PageOfGradients {
    at::Tensor bucket;                     // [padded_numel]; undefined while closed
    std::unique_ptr<ShardGradient> owned;  // [shard_numel]; null for a page that does not train
    std::vector<Range> gaps;               // of the page: where no parameter that trains lies
  };

  std::unique_ptr<ShardGradient> make_owned(size_t page) const;
  std::vector<Range> gaps_between(size_t page, const std::vector<size_t>& parameters) const;

  const std::shared_ptr<ParameterPages> pages_;
  const accumulate::SumOrder order_;
  std::vector<PageOfGradients> pages_of_gradients_;
  ShardSource* const source_;  // owned by paged_
  PagedGradients paged_;
  std::optional<size_t> leaving_;  // the page closed last, whose bucket may still be read
};

}  // namespace zeropage
