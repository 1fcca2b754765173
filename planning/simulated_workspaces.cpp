#include "planning/simulated_workspaces.h"

#include <ATen/ops/empty.h>

#include "zeropage/ledger.h"

namespace zeropage::planning {
namespace {

std::vector<at::Tensor> tensors_of(const memory::ProductWorkspaces& sizes, memory::Kind kind) {
  const memory::KindScope of_kind(kind);
  std::vector<at::Tensor> tensors;
  for (const int64_t bytes : {sizes.of_products, sizes.of_biased_products}) {
    if (bytes > 0) tensors.push_back(at::empty({bytes}, at::device(c10::kMeta).dtype(c10::kByte)));
  }
  return tensors;
}

}  // namespace

void SimulatedWorkspaces::before_forward() {
  if (!of_forward_) of_forward_ = tensors_of(sizes_, memory::Kind::kActivation);
}

void SimulatedWorkspaces::before_backward() {
  if (!of_backward_) of_backward_ = tensors_of(sizes_, memory::Kind::kActivationAndOther);
}

}  // namespace zeropage::planning
