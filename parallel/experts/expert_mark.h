// The mark of a weight whose experts are cut over ranks (zeropage/expert_parallel.h), for those who get tensors without their layer: this
// rank has other experts than most ranks beside it. Operators take the weight as it is.
//
// Lifetime, threads: those of operators/tensor_mark.h.
#pragma once

#include "operators/tensor_mark.h"

namespace zeropage::parallel::experts {

class ExpertMark final : public operators::TensorMark {
 public:
  ExpertMark() : operators::TensorMark("experts that are cut over ranks", On::kParameter) {}

  bool replaces(const c10::OperatorHandle& /*handle*/) const override { return false; }
  bool run(const c10::OperatorHandle& /*handle*/, const at::Tensor& /*marked*/,
           torch::jit::Stack& /*stack*/) override {
    return false;
  }
};

inline bool has_expert_mark(const at::Tensor& tensor) {
  return dynamic_cast<const ExpertMark*>(operators::mark_of(tensor)) != nullptr;
}

}  // namespace zeropage::parallel::experts
