#include "accumulate/micro_step_sums.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

namespace zeropage::accumulate {

bool MicroStepSums::empty() const {
  return std::none_of(partial_sums_.begin(), partial_sums_.end(),
                      [](const at::Tensor& sum) { return sum.defined(); });
}

void MicroStepSums::push(const at::Tensor& term) {
  at::Tensor carry;  // undefined: the term itself
  for (size_t digit = 0;; ++digit) {
    if (digit == partial_sums_.size()) partial_sums_.emplace_back();
    at::Tensor& sum = partial_sums_[digit];
    if (!sum.defined()) {
      sum = carry.defined() ? carry : term.clone();
      return;
    }
    sum.add_(carry.defined() ? carry : term);
    if (order_ == SumOrder::kRunning) return;
    carry = std::exchange(sum, {});
  }
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

}  // namespace zeropage::accumulate
