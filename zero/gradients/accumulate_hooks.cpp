#include "zero/gradients/accumulate_hooks.h"

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

AccumulateHooks::~AccumulateHooks() {
  accumulator_->del_post_hook(after_);
  std::erase_if(accumulator_->pre_hooks(),
                [this](const auto& hook) { return hook.get() == before_; });
}

}  // namespace zeropage::detail
