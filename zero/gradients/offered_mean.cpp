#include "zero/gradients/offered_mean.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <torch/csrc/autograd/grad_mode.h>

namespace zeropage::zero {
namespace {

// What does to a sum what it does to the mean: multiplying, and zeroing. A quotient that is rounded does not.
bool commutes_with_mean(const c10::OperatorName& operation) {
  constexpr std::array<std::string_view, 10> kNames = {
      "aten::zero_",          "aten::mul_",          "aten::div_",          "aten::neg_",
      "aten::_foreach_zero_", "aten::_foreach_mul_", "aten::_foreach_div_", "aten::_foreach_neg_",
      "aten::detach",         "aten::detach_"};
  return std::find(kNames.begin(), kNames.end(), operation.name) != kNames.end() &&
         !operation.overload_name.ends_with("_mode");
}

}  // namespace

void OfferedMean::offer(Offer offer) {
  is_offered_ = true;
  is_skipped_at_overflow_ = offer.is_skipped_at_overflow;
  make_ = std::move(offer.make);
  reducer_->buckets().reduced().set_before_use(
      [this](const c10::OperatorName& operation, bool reads) {
        if (reads || !commutes_with_mean(operation)) this->make();
      });
}

// What it does itself with gradients is no use of them.
void OfferedMean::make() {
  // Where it throws, whoever looks again hears the same.
  std::function<void()> make = std::exchange(make_, nullptr);
  if (!make) return;
  const torch::NoGradGuard no_grad;
  try {
    take_over_writes(*reducer_);
    make();
  } catch (...) {
    make_ = std::move(make);
    throw;
  }
  reducer_->buckets().reduced().set_before_use({});
  // What a script sets by hand from here on is one rank's mean.
  BackwardPlan plan = reducer_->plan();
  plan.op = comm::ReduceOp::kMean;
  reducer_->set_plan(plan);
}

void OfferedMean::settle() {
  if (is_offered_ && any_replaced()) make();
  end();
}

void OfferedMean::end() {
  if (!std::exchange(is_offered_, false)) return;
  make_ = nullptr;
  reducer_->buckets().reduced().set_before_use({});
}

// Gradients that a backward gave and a script has replaced since.
bool OfferedMean::any_replaced() const {
  const std::vector<size_t>& all = reducer_->training().all();
  return std::any_of(all.begin(), all.end(), [this](size_t index) {
    const at::Tensor& gradient = reducer_->training().gradient(index);
    return gradient.defined() && !reducer_->buckets().reduced().is(index, gradient);
  });
}

}  // namespace zeropage::zero
