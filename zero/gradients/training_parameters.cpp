#include "zero/gradients/training_parameters.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "zero/gradients/accumulate_hooks.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

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
