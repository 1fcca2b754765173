// Calls before and after autograd accumulates the gradient of one leaf, on the thread that runs its
// backward. Taken off the leaf when this goes.
#pragma once

#include <cstdint>
#include <functional>

#include <torch/csrc/autograd/function.h>

#include "base/libtorch_release.h"

namespace zeropage::zero {

class AccumulateHooks {
 public:
  using Gradients = torch::autograd::variable_list;
  // Gets the incoming gradients; what it returns is accumulated instead.
  using Before = std::function<Gradients(const Gradients&)>;
  using After = std::function<void()>;

  // leaf: requires a gradient.
  AccumulateHooks(const at::Tensor& leaf, Before before, After after);
  ~AccumulateHooks();
  // The leaf was given other values by set_data(), which drops its accumulator where their type is
  // another.
  void restore(const at::Tensor& leaf) const;
  AccumulateHooks(const AccumulateHooks&) = delete;
  AccumulateHooks& operator=(const AccumulateHooks&) = delete;

 private:
  const base::NodePointer accumulator_;
  torch::autograd::FunctionPreHook* before_ = nullptr;  // owned by accumulator_
  uintptr_t after_ = 0;
};

// Whether the leaf has such hooks.
bool has_accumulate_hooks(const at::Tensor& leaf);

}  // namespace zeropage::zero
