// Gradients whose buckets live as long as their pages, whole on every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accumulate/micro_step_sums.h"
#include "zero/gradients/gradient_buckets.h"

namespace zeropage {

class WholeGradients : public GradientBuckets {
 public:
  void begin_training(size_t page, const std::vector<size_t>& parameters) override;
  const at::Tensor& open(size_t page, Collect) override { return pages_of_gradients_[page].bucket; }
  bool are_transient() const override { return false; }
  void close(size_t page, Backwards backwards) override;
  bool complete(size_t page) override;
  const at::Tensor& owned(size_t page) const override { return pages_of_gradients_[page].owned; }
  const at::Tensor& reduced_gradient(size_t parameter) const override { return slots_[parameter]; }
  void keep(size_t page, const std::vector<Range>& forgotten) override;
  void forget(size_t page) override;
  void skip(size_t page) override;
  void forget(size_t page, const Range& range) override;

 protected:
  WholeGradients(std::shared_ptr<ParameterPages> pages, const Options& options);

  const ParameterPages& pages() const { return *pages_; }
  // What travels: the bucket, or for as long as it takes a copy of it in reduce_dtype.
  const at::Tensor& wire(size_t page);
  // "the gradient of page "blocks.3"".
  std::string describe(size_t page) const;
  const std::string& name_of(size_t parameter) const;

 private:
  struct PageOfGradients {
    at::Tensor bucket;               // [padded_numel]; undefined for a page that does not train
    at::Tensor owned;                // [owned numel], in the bucket
    at::Tensor wire;                 // [padded_numel] in reduce_dtype, while that is reduced
    accumulate::MicroStepSums kept;  // [owned numel]: of earlier backwards
  };

  const std::shared_ptr<ParameterPages> pages_;
  std::vector<PageOfGradients> pages_of_gradients_;
  std::vector<at::Tensor> slots_;  // by parameter, shaped as it; undefined if it does not train
};

// Every rank gets the whole mean, and p.grad() is the parameter's slot in the bucket: 2 (N-1)/N bytes a gradient byte on the wire.
class ReplicatedGradients final : public WholeGradients {
 public:
  ReplicatedGradients(std::shared_ptr<ParameterPages> pages, const Options& options)
      : WholeGradients(std::move(pages), options) {}
  comm::Pending start_reduction(size_t page, comm::ReduceOp op) override;
  void replace(size_t parameter, const at::Tensor& gradient) override;
  void gather(const std::vector<size_t>&, memory::Pins&) override {}
};

}  // namespace zeropage
