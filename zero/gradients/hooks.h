// The hooks of autograd by which gradients come, and the parameters that have them.
//
// Threads: the thread that runs backward.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/function.h>

#include "base/libtorch_release.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

// Calls before and after autograd accumulates the gradient of one leaf, on the thread that runs its
// backward. Taken off the leaf when this goes.
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

// When parameters that were unfrozen are adopted.
enum class Unfrozen : uint8_t {
  kInForward,   // in the forward of the wrapper
  kInBackward,  // in the first hook of the next backward, of an optimizer alone
};

// Which parameters have gradients: those that do when the module is wrapped, and those that are unfrozen
// later. Calls functions before and after autograd accumulates the gradient of each.
//
// Frozen ones have hooks too where nobody sees a forward (Unfrozen::kInBackward), so that the first backward with one that
// was unfrozen tells of it.
//
// Lifetime: takes its hooks off the parameters when it goes.
class TrainingParameters {
 public:
  using Gradients = std::vector<at::Tensor>;
  struct Calls {
    // Gets the incoming gradients; what it returns is accumulated instead.
    std::function<Gradients(size_t parameter, const Gradients&)> before;
    std::function<void(size_t parameter)> after;
  };

  // Calls are also for frozen parameters where unfrozen is kInBackward.
  TrainingParameters(std::shared_ptr<ParameterPages> pages, Calls calls, Unfrozen unfrozen);
  ~TrainingParameters();
  TrainingParameters(const TrainingParameters&) = delete;
  TrainingParameters& operator=(const TrainingParameters&) = delete;

  // Takes in those that require a gradient and did not before. Returns their pages, the last first.
  std::vector<size_t> adopt();
  // After parameters of these pages were given other values by set_data().
  void restore_hooks(const std::vector<size_t>& pages) const;

  // The number of all parameters, those that do not train too.
  size_t size() const { return hooks_.size(); }
  bool contains(size_t parameter) const { return trains_[parameter]; }
  // Those that train, ascending.
  const std::vector<size_t>& all() const { return all_; }
  // The page's parameters that train, ascending.
  const std::vector<size_t>& of_page(size_t page) const { return of_page_[page]; }
  // Pages that train, the last of the module first: the order in which backward completes them.
  const std::vector<size_t>& pages() const { return order_; }

  // Parameters that require a gradient, and did not when adopt() was called last.
  std::vector<size_t> unfrozen() const;
  // Throws if there are unfrozen() ones.
  void check_all_train() const;
  Unfrozen adopted_in() const { return adopted_in_; }

  at::Tensor& gradient(size_t parameter) const {
    return pages_->parameters().impl(parameter).mutable_grad();
  }
  const std::string& name(size_t parameter) const { return placed(parameter).parameter.name(); }
  const PlacedParameter& placed(size_t parameter) const { return pages_->parameters()[parameter]; }

 private:
  void hook(size_t parameter);

  const std::shared_ptr<ParameterPages> pages_;
  const Calls calls_;
  const Unfrozen adopted_in_;
  std::vector<std::unique_ptr<AccumulateHooks>> hooks_;  // by parameter; null: none
  std::vector<bool> trains_;                             // by parameter
  std::vector<std::vector<size_t>> of_page_;
  std::vector<size_t> order_;
  std::vector<size_t> all_;
  std::vector<size_t> others_;  // that do not train, ascending
};

}  // namespace zeropage::zero
