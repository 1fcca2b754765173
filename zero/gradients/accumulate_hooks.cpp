#include "zero/gradients/accumulate_hooks.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "memory/check.h"

namespace zeropage::detail {
namespace {

using Gradients = AccumulateHooks::Gradients;

struct PreHook final : torch::autograd::FunctionPreHook {
  explicit PreHook(AccumulateHooks::Before call) : call(std::move(call)) {}
  Gradients operator()(const Gradients& gradients) override { return call(gradients); }
  AccumulateHooks::Before call;
};

struct PostHook final : torch::autograd::FunctionPostHook {
  explicit PostHook(AccumulateHooks::After call) : call(std::move(call)) {}
  Gradients operator()(const Gradients& outputs, const Gradients&) override {
    call();
    return outputs;
  }
  AccumulateHooks::After call;
};

}  // namespace

AccumulateHooks::AccumulateHooks(const at::Tensor& leaf, Before before, After after)
    : accumulator_(torch::autograd::impl::grad_accumulator(leaf)) {
  TORCH_INTERNAL_ASSERT(accumulator_, "a leaf that requires grad has an accumulator");
  auto pre_hook = std::make_unique<PreHook>(std::move(before));
  before_ = pre_hook.get();
  accumulator_->add_pre_hook(std::move(pre_hook));
  after_ = accumulator_->add_post_hook(std::make_unique<PostHook>(std::move(after)));
}

void AccumulateHooks::restore(const at::Tensor& leaf) const {
  if (torch::autograd::impl::try_get_grad_accumulator(leaf) == accumulator_) return;
  torch::autograd::impl::set_grad_accumulator(leaf, accumulator_);
}

bool has_accumulate_hooks(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!accumulator) return false;
  return std::any_of(
      accumulator->pre_hooks().begin(), accumulator->pre_hooks().end(),
      [](const auto& hook) { return dynamic_cast<const PreHook*>(hook.get()) != nullptr; });
}

AccumulateHooks::~AccumulateHooks() {
  accumulator_->del_post_hook(after_);
  std::erase_if(accumulator_->pre_hooks(),
                [this](const auto& hook) { return hook.get() == before_; });
}

}  // namespace zeropage::detail
