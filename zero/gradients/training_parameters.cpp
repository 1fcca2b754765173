#include "zero/gradients/training_parameters.h"

#include <algorithm>
#include <utility>

#include "memory/check.h"
#include "zero/gradients/accumulate_hooks.h"

namespace zeropage {

TrainingParameters::TrainingParameters(std::shared_ptr<ParameterPages> pages, Calls calls)
    : pages_(std::move(pages)),
      calls_(std::move(calls)),
      hooks_(pages_->parameters().size()),
      of_page_(pages_->layouts().size()) {}

TrainingParameters::~TrainingParameters() = default;

std::vector<size_t> TrainingParameters::adopt() {
  std::vector<bool> changed(of_page_.size());
  for (const size_t index : unfrozen()) {
    std::vector<size_t>& of_page = of_page_[placed(index).page];
    of_page.insert(std::upper_bound(of_page.begin(), of_page.end(), index), index);
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
    if (changed[page]) pages.push_back(page);
  }
  return pages;
}

void TrainingParameters::restore_hooks() const {
  for (size_t index = 0; index < hooks_.size(); ++index) {
    if (contains(index)) hooks_[index]->restore(placed(index).parameter.tensor);
  }
}

std::vector<size_t> TrainingParameters::unfrozen() const {
  std::vector<size_t> parameters;
  for (size_t index = 0; index < hooks_.size(); ++index) {
    if (!contains(index) && placed(index).parameter.tensor.requires_grad()) {
      parameters.push_back(index);
    }
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
