#include "zero/gradients/gradient_looks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <utility>

#include <torch/csrc/autograd/grad_mode.h>

#include "optim/bit_hashes.h"
#include "zeropage/check.h"

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

bool multiplies(const c10::OperatorName& operation) {
  constexpr std::array<std::string_view, 4> kNames = {"aten::mul_", "aten::div_",
                                                      "aten::_foreach_mul_", "aten::_foreach_div_"};
  return std::find(kNames.begin(), kNames.end(), operation.name) != kNames.end();
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

HandSetGradients::HandSetGradients(std::shared_ptr<GradientReducer> reducer)
    : reducer_(std::move(reducer)) {
  if (reducer_->world().size() == 1) return;
  reducer_->buckets().reduced().set_on_use(
      [this](const c10::OperatorName& operation, bool reads) { look(operation, reads); });
}

HandSetGradients::~HandSetGradients() {
  reducer_->buckets().reduced().set_on_use({});
}

void HandSetGradients::look(const c10::OperatorName& operation, bool reads) {
  if (!multiplies(operation)) {
    has_read_ = has_read_ || reads;
    return;
  }
  if (!std::exchange(has_read_, false)) return;
  // A script that reads and multiplies one after the other does so as often as there are parameters.
  if (std::has_single_bit(++turns_)) check_alike(operation);
}

std::vector<size_t> HandSetGradients::own() const {
  const TrainingParameters& training = reducer_->training();
  const ReducedGradients& reduced = reducer_->buckets().reduced();
  std::vector<size_t> own;
  for (const size_t index : training.all()) {
    const at::Tensor& gradient = training.gradient(index);
    if (!gradient.defined() || reduced.is(index, gradient)) continue;
    if (!reducer_->is_reduced() || !reducer_->has_averaged(index)) own.push_back(index);
  }
  return own;
}

void HandSetGradients::check_alike(const c10::OperatorName& operation) const {
  const std::vector<size_t> own = this->own();
  if (own.empty()) return;
  const torch::NoGradGuard no_grad;
  uint64_t hash = 0;
  for (const size_t index : own) {
    const at::Tensor flat = reducer_->training().gradient(index).detach().contiguous().view({-1});
    if (flat.numel() == 0 || flat.is_meta()) continue;
    for (const uint64_t of : optim::bit_hashes({flat})) hash = hash * 0x9E3779B97F4A7C15ULL + of;
  }
  // A hash is cut to 53 bits, so that a double has all of them.
  const auto told = static_cast<double>(hash >> 11);
  const comm::World& world = reducer_->world();
  const double most = world.max(told);
  ZP_CHECK(most == -world.max(-told), "p.grad() of parameter \"",
           reducer_->training().name(own.front()),
           "\" is each rank's own, set by hand to other values on each, while ", operation.name,
           " multiplies gradients that were read: expected that all of them are means over ranks, "
           "as torch::nn::utils::clip_grad_norm_ else takes another norm on each rank; clip by "
           "zeropage::clip_grad_norm_, which averages it first, or set it before backward()");
}

}  // namespace zeropage::zero
