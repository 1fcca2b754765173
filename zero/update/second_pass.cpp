#include "zero/update/second_pass.h"

#include "optim/adopt_copy.h"
#include "optim/fused_step.h"
#include "optim/split_values.h"

namespace zeropage::zero {
namespace {

at::Tensor part_of(const at::Tensor& flat, const Range& range) {
  return flat.defined() ? flat.narrow(0, range.begin, range.numel()) : flat;
}

}  // namespace

void copy_exact_values(const OwnedPart& part, const Range& range, const at::Tensor& to) {
  if (part.values.is_meta()) return;
  at::Tensor values = part_of(part.values, range);
  if (part.adopts_copy) optim::adopt_copy(values, part_of(part.copy_out, range));
  if (part.remainders.defined()) {
    values = optim::joined_values(values, part_of(part.remainders, range));
  }
  part_of(to, range).copy_(values);
}

void descend_along(const OwnedPart& part, const Range& range, const optim::UpdateRule& rule,
                   int64_t step, const at::Tensor& directions, double factor) {
  const optim::Stretch stretch{.values = part_of(part.values, range),
                               .gradient = part_of(directions, range),
                               .copy_out = part_of(part.copy_out, range),
                               .states = {},
                               .remainders = part_of(part.remainders, range),
                               .adopts_copy = part.adopts_copy};
  optim::detail::fused_step(rule, step, {&stretch, 1}, {.scale = factor});
}

}  // namespace zeropage::zero
