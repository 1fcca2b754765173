#include "zero/gradients/own_gradients.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <utility>

#include <torch/csrc/autograd/grad_mode.h>

#include "zero/pages/value_hash.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

bool multiplies(const c10::OperatorName& operation) {
  constexpr std::array<std::string_view, 4> kNames = {"aten::mul_", "aten::div_",
                                                      "aten::_foreach_mul_", "aten::_foreach_div_"};
  return std::find(kNames.begin(), kNames.end(), operation.name) != kNames.end();
}

}  // namespace

OwnGradients::OwnGradients(std::shared_ptr<GradientReducer> reducer)
    : reducer_(std::move(reducer)) {
  if (reducer_->world().size() == 1) return;
  reducer_->buckets().reduced().set_on_use(
      [this](const c10::OperatorName& operation, bool reads) { look(operation, reads); });
}

OwnGradients::~OwnGradients() {
  reducer_->buckets().reduced().set_on_use({});
}

void OwnGradients::look(const c10::OperatorName& operation, bool reads) {
  if (!multiplies(operation)) {
    has_read_ = has_read_ || reads;
    return;
  }
  if (!std::exchange(has_read_, false)) return;
  // A script that reads and multiplies one after the other does so as often as there are parameters.
  if (std::has_single_bit(++turns_)) check_alike(operation);
}

std::vector<size_t> OwnGradients::own() const {
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

void OwnGradients::check_alike(const c10::OperatorName& operation) const {
  const std::vector<size_t> own = this->own();
  if (own.empty()) return;
  const torch::NoGradGuard no_grad;
  uint64_t hash = 0;
  for (const size_t index : own) {
    const at::Tensor flat = reducer_->training().gradient(index).detach().contiguous().view({-1});
    if (flat.numel() == 0 || flat.is_meta()) continue;
    for (const uint64_t of : hashes_of_values({flat})) hash = hash * 0x9E3779B97F4A7C15ULL + of;
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
