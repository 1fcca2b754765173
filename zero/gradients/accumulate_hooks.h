// Calls before and after autograd accumulates the gradient of one leaf, on the thread that runs its
// backward. Taken off the leaf when this goes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <torch/csrc/autograd/function.h>

namespace zeropage::detail {

class AccumulateHooks {
 public:
  using Gradients = torch::autograd::variable_list;
  // Gets the incoming gradients; what it returns is accumulated instead.
  using Before = std::function<Gradients(const Gradients&)>;
  using After = std::function<void()>;

  // leaf: requires a gradient.
  AccumulateHooks(const at::Tensor& leaf, Before before, After after);
  ~AccumulateHooks();
  AccumulateHooks(const AccumulateHooks&) = delete;
  AccumulateHooks& operator=(const AccumulateHooks&) = delete;

 private:
  const std::shared_ptr<torch::autograd::Node> accumulator_;
  torch::autograd::FunctionPreHook* before_ = nullptr;  // owned by accumulator_
  uintptr_t after_ = 0;
};

}  // namespace zeropage::detail
