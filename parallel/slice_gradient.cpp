#include "parallel/slice_gradient.h"

#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/known_slice.h"

namespace zeropage::parallel {
namespace {

// Marks the gradient of a leaf as autograd brings it.
class MarkingHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit MarkingHook(c10::intrusive_ptr<KnownSlice> mark) : mark_(std::move(mark)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const at::Tensor& gradient = gradients.front();
    if (!gradient.defined() || !gradient.has_storage() || operators::mark_of(gradient) != nullptr) {
      return gradients;
    }
    // One that others hold may be the gradient of a whole tensor, too.
    const bool is_shared = gradient.use_count() > 1;
    const at::Tensor own = is_shared ? gradient.clone() : gradient;
    operators::set_mark(own, mark_);
    return {own};
  }

 private:
  const c10::intrusive_ptr<KnownSlice> mark_;
};

}  // namespace

void watch_gradient(const at::Tensor& parameter) {
  if (!at::GradMode::is_enabled() || !parameter.requires_grad() || !parameter.is_leaf()) return;
  const KnownSlice* const mark = known_slice_of(parameter);
  if (mark == nullptr) return;
  // In front of the script's hooks, which see the mark, and behind them, as they may return another tensor.
  auto& hooks = torch::autograd::impl::hooks(parameter);
  const auto is_ours = [](const auto& hook) {
    return dynamic_cast<const MarkingHook*>(hook.get()) != nullptr;
  };
  if (hooks.empty() || !is_ours(hooks.front())) {
    hooks.insert(hooks.begin(), std::make_unique<MarkingHook>(mark->of_gradient()));
  }
  if (!is_ours(hooks.back())) {
    hooks.push_back(std::make_unique<MarkingHook>(mark->of_gradient()));
  }
}

bool mark_as_gradient(const at::Tensor& gradient, const at::Tensor& parameter,
                      c10::intrusive_ptr<c10::BackendMeta> kept) {
  const KnownSlice* const of = known_slice_of(parameter);
  if (of == nullptr) return false;
  if (operators::mark_of(gradient) != nullptr) return true;
  auto mark = of->of_gradient();
  if (kept) mark->keep(std::move(kept));
  operators::set_mark(gradient, std::move(mark));
  return true;
}

}  // namespace zeropage::parallel
