#include "zero/update/state_blocks.h"

#include <ATen/ops/full.h>

#include "zeropage/ledger.h"

namespace zeropage::zero {

size_t StateBlocks::add(int64_t numel, int64_t scales) {
  blocks_.push_back({.numel = numel, .scales_numel = scales});
  return blocks_.size() - 1;
}

void StateBlocks::extend(size_t block, const Beginning& beginning) {
  Block& of = blocks_[block];
  for (size_t index = of.states.size(); index < beginning.states.size(); ++index) {
    of.states.push_back(made(beginning.states[index], of.numel));
  }
  for (size_t index = of.scales.size(); index < beginning.scales.size(); ++index) {
    of.scales.push_back(made(beginning.scales[index], of.scales_numel));
  }
}

at::Tensor StateBlocks::made(const at::Tensor& beginning, int64_t numel) const {
  const auto element = beginning[0].item<double>();
  if (part_.states != nullptr) {
    return part_.states->add(part_.page, numel, beginning.scalar_type(), element,
                             memory::Kind::kOptimizerState);
  }
  const memory::KindScope kind(memory::Kind::kOptimizerState);
  return at::full({numel}, element,
                  at::TensorOptions(part_.values.device()).dtype(beginning.dtype()));
}

}  // namespace zeropage::zero
