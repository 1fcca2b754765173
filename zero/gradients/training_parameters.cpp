#include "zero/gradients/training_parameters.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "memory/check.h"
#include "zero/gradients/accumulate_hooks.h"

namespace zeropage {

TrainingParameters::TrainingParameters(std::shared_ptr<ParameterPages> pages, Calls calls)
    : pages_(std::move(pages)),
      calls_(std::move(calls)),
      hooks_(pages_->parameters().size()),
      of_page_(pages_->layouts().size()),
      others_(hooks_.size()) {
  std::iota(others_.begin(), others_.end(), size_t{0});
}

TrainingParameters::~TrainingParameters() = default;

std::vector<size_t> TrainingParameters::adopt() {
  std::vector<bool> changed(of_page_.size());
  for (const size_t index : unfrozen()) {
    of_page_[placed(index).page].push_back(index);
    changed[placed(index).page] = true;
    hooks_[index] = std::make_unique<detail::AccumulateHooks>(
        placed(index).parameter.tensor,
        [this, index](const Gradients& gradients) { return calls_.before(index, gradients); },
        [this, index] { calls_.after(index); });
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

}  // namespace zeropage
