#include "zero/gradients/micro_step_sums.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

namespace zeropage::zero {

SumOrder sum_order_of(const Options& options) {
  return options.world_invariant ? SumOrder::kTree : SumOrder::kRunning;
}

bool MicroStepSums::empty() const {
  return std::none_of(partial_sums_.begin(), partial_sums_.end(),
                      [](const at::Tensor& sum) { return sum.defined(); });
}

void MicroStepSums::push(const at::Tensor& term) {
  // The term itself until it is added to something.
  at::Tensor carry = term;
  const uint64_t carries = order_ == SumOrder::kTree ? pushed_ : 0;
  size_t digit = 0;
  for (; carries >> digit & 1; ++digit) {
    const at::Tensor sum = std::exchange(partial_sums_[digit], {});
    if (!sum.defined()) continue;
    if (carry.defined()) sum.add_(carry);
    carry = sum;
  }
  ++pushed_;
  if (digit == partial_sums_.size()) partial_sums_.emplace_back();
  at::Tensor& sum = partial_sums_[digit];
  if (sum.defined()) {
    sum.add_(carry);
  } else {
    sum = term.defined() && carry.is_same(term) ? term.clone() : carry;
  }
}

void MicroStepSums::skip() {
  for (at::Tensor& sum : partial_sums_) sum.reset();
  push({});
}

void MicroStepSums::clear() {
  partial_sums_.clear();
  pushed_ = 0;
}

void MicroStepSums::add_to(const at::Tensor& last) {
  for (const at::Tensor& sum : partial_sums_) {
    if (sum.defined()) last.add_(sum);
  }
  clear();
}

void MicroStepSums::zero(int64_t begin, int64_t numel) {
  for (const at::Tensor& sum : partial_sums_) {
    if (sum.defined()) sum.narrow(0, begin, numel).zero_();
  }
}

}  // namespace zeropage::zero
