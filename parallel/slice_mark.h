// The mark of a parameter that was cut in place, so that each rank of a tensor-parallel group has another
// slice of it. A layer that is made of slices says so itself (parallel/sliced_layer.h).
//
// Lifetime, threads: those of operators/tensor_mark.h.
#pragma once

#include <string>
#include <utility>

#include "comm/world.h"
#include "operators/tensor_mark.h"
#include "parallel/ranks.h"
#include "parallel/slices.h"

namespace zeropage::parallel {

// By itself it replaces no operator.
class SliceMark : public memory::TensorMark {
 public:
  // ranks: those of the group. cut: how the whole was cut.
  SliceMark(std::string who, RanksPointer ranks, SlicedDimension cut)
      : TensorMark(std::move(who), On::kParameter),
        ranks_(std::move(ranks)),
        cut_(std::move(cut)) {}

  bool replaces(const c10::OperatorHandle& /*handle*/) const override { return false; }
  bool run(const c10::OperatorHandle& /*handle*/, const at::Tensor& /*marked*/,
           torch::jit::Stack& /*stack*/) override {
    return false;
  }

  const comm::World& ranks() const { return ranks_->world; }
  const SlicedDimension& cut() const { return cut_; }

 private:
  const RanksPointer ranks_;
  const SlicedDimension cut_;
};

}  // namespace zeropage::parallel
