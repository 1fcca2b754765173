#include "zero/gradients/hooks.h"

#include <algorithm>
#include <numeric>
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

// A frozen leaf has no accumulator, and keeps one that it had before it was frozen. Past the dispatcher, as nothing of the
// leaf is read or written.
class RequiresGradScope {
 public:
  explicit RequiresGradScope(const at::Tensor& leaf)
      : leaf_(*leaf.unsafeGetTensorImpl()), before_(leaf.requires_grad()) {
    leaf_.set_requires_grad(true);
  }
  ~RequiresGradScope() { leaf_.set_requires_grad(before_); }
  RequiresGradScope(const RequiresGradScope&) = delete;
  RequiresGradScope& operator=(const RequiresGradScope&) = delete;

 private:
  c10::TensorImpl& leaf_;
  const bool before_;
};

}  // namespace

AccumulateHooks::AccumulateHooks(const at::Tensor& leaf, Before before, After after)
    : accumulator_((check_accumulate_hooks(), torch::autograd::impl::grad_accumulator(leaf))) {
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

TrainingParameters::TrainingParameters(std::shared_ptr<ParameterPages> pages, Calls calls,
                                       Unfrozen unfrozen)
    : pages_(std::move(pages)),
      calls_(std::move(calls)),
      adopted_in_(unfrozen),
      hooks_(pages_->parameters().size()),
      trains_(hooks_.size()),
      of_page_(pages_->layouts().size()),
      others_(hooks_.size()) {
  std::iota(others_.begin(), others_.end(), size_t{0});
  if (adopted_in_ == Unfrozen::kInForward) return;
  for (size_t index = 0; index < hooks_.size(); ++index) {
    const at::Tensor& tensor = placed(index).parameter.tensor;
    if (!tensor.is_floating_point() && !tensor.is_complex()) continue;
    const RequiresGradScope trains(tensor);
    hook(index);
  }
}

void TrainingParameters::hook(size_t parameter) {
  hooks_[parameter] = std::make_unique<AccumulateHooks>(
      placed(parameter).parameter.tensor,
      [this, parameter](const Gradients& gradients) { return calls_.before(parameter, gradients); },
      [this, parameter] { calls_.after(parameter); });
}

TrainingParameters::~TrainingParameters() = default;

std::vector<size_t> TrainingParameters::adopt() {
  std::vector<bool> changed(of_page_.size());
  for (const size_t index : unfrozen()) {
    of_page_[placed(index).page].push_back(index);
    changed[placed(index).page] = true;
    if (hooks_[index] == nullptr) hook(index);
    trains_[index] = true;
  }
  std::vector<size_t> pages;
  order_.clear();
  for (size_t page = of_page_.size(); page-- > 0;) {
    if (!of_page_[page].empty()) order_.push_back(page);
    if (!changed[page]) continue;
    std::sort(of_page_[page].begin(), of_page_[page].end());
    pages.push_back(page);
  }
  all_.clear();
  others_.clear();
  for (size_t index = 0; index < hooks_.size(); ++index) {
    (contains(index) ? all_ : others_).push_back(index);
  }
  return pages;
}

void TrainingParameters::restore_hooks(const std::vector<size_t>& pages) const {
  for (const size_t page : pages) {
    for (const size_t index : of_page_[page])
      hooks_[index]->restore(placed(index).parameter.tensor);
  }
}

std::vector<size_t> TrainingParameters::unfrozen() const {
  std::vector<size_t> parameters;
  for (const size_t index : others_) {
    if (placed(index).parameter.tensor.requires_grad()) parameters.push_back(index);
  }
  return parameters;
}

void TrainingParameters::check_all_train() const {
  const std::vector<size_t> missed = unfrozen();
  ZP_CHECK(missed.empty(), "step(): parameter \"", missed.empty() ? "" : name(missed.front()),
           "\" requires a gradient, but did not when the wrapped module was called last, so its "
           "gradient is this rank's own; call zero_grad(), and the wrapper, model(x) instead of "
           "model->forward(x), after unfreezing it");
}

}  // namespace zeropage::zero
