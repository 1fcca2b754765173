#include "zero/gradients/accumulate_hooks.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "memory/self_check.h"
#include "zeropage/check.h"

namespace zeropage::zero {
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

void probe_accumulate_hooks() {
  const at::Tensor leaf = at::full({2}, 3.0, at::kFloat).requires_grad_();
  int calls = 0, before = 0, after = 0, end = 0;
  int task = -1;
  const auto count = [&](int& place) {
    place = ++calls;
    task = torch::autograd::get_current_graph_task_id();
  };
  {
    const AccumulateHooks hooks(
        leaf,
        [&](const Gradients& gradients) {
          count(before);
          memory::expect_of_libtorch("no gradient before the first is accumulated",
                                     !leaf.grad().defined());
          torch::autograd::Engine::get_default_engine().queue_callback([&] { count(end); });
          return Gradients{gradients[0] * 10};
        },
        [&] {
          count(after);
          memory::expect_of_libtorch("the first element of the gradient that was accumulated",
                                     60.0F, leaf.grad()[0].item<float>());
        });
    (leaf * leaf).sum().backward();
  }
  memory::expect_of_libtorch("the place of the hook before AccumulateGrad", 1, before);
  memory::expect_of_libtorch("the place of the hook behind AccumulateGrad", 2, after);
  memory::expect_of_libtorch("the place of what was queued for the end of the backward", 3, end);
  memory::expect_of_libtorch("a hook knows in which backward it is", task != -1);
  memory::expect_of_libtorch("the current backward after backward() returned", -1,
                             torch::autograd::get_current_graph_task_id());
  (leaf * leaf).sum().backward();
  memory::expect_of_libtorch("calls of hooks once they were taken off", 3, calls);
}

void check_accumulate_hooks() {
  static memory::SelfCheck check("gradients of several ranks", "", &probe_accumulate_hooks);
  check.require();
}

}  // namespace

AccumulateHooks::AccumulateHooks(const at::Tensor& leaf, Before before, After after)
    : accumulator_((check_accumulate_hooks(), torch::autograd::impl::grad_accumulator(leaf))) {
  TORCH_INTERNAL_ASSERT(accumulator_, "a leaf that requires grad has an accumulator");
  auto pre_hook = std::make_unique<PreHook>(std::move(before));
  before_ = pre_hook.get();
  accumulator_->add_pre_hook(std::move(pre_hook));
  after_ = accumulator_->add_post_hook(std::make_unique<PostHook>(std::move(after)));
}

void AccumulateHooks::restore(const at::Tensor& leaf) const {
  if (torch::autograd::impl::try_get_grad_accumulator(leaf) == accumulator_) return;
  torch::autograd::impl::set_grad_accumulator(leaf, base::weak(accumulator_));
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

}  // namespace zeropage::zero
