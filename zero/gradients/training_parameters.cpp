// Which parameters have gradients: those that do when the module is wrapped, and those that are unfrozen
// later.
#include <algorithm>
#include <utility>

#include "memory/check.h"
#include "zero/gradients/accumulate_hooks.h"
#include "zero/gradients/gradient_reducer.h"

namespace zeropage {

GradientReducer::GradientReducer(std::shared_ptr<ParameterPages> pages,
                                 std::unique_ptr<GradientBuckets> buckets, ReduceWhen when)
    : pages_(std::move(pages)),
      buckets_(std::move(buckets)),
      when_(when),
      ledger_(memory::Ledger::current()),
      states_(pages_->layouts().size()),
      hooked_(pages_->parameters().size()),
      waiting_(states_.size()) {
  used_ = at::zeros({static_cast<int64_t>(hooked_.size())}, at::kByte);
  hook_what_trains();
}

GradientReducer::~GradientReducer() = default;

void GradientReducer::hook_what_trains() {
  std::vector<size_t> changed;
  for (size_t index = 0; index < hooked_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (trains(index) || !placed.parameter.tensor.requires_grad()) continue;
    auto& parameters = states_[placed.page].parameters;
    parameters.insert(std::upper_bound(parameters.begin(), parameters.end(), index), index);
    if (changed.empty() || changed.back() != placed.page) changed.push_back(placed.page);
    hook(index);
  }
  launch_order_.clear();
  for (size_t page = states_.size(); page-- > 0;) {
    if (!states_[page].parameters.empty()) launch_order_.push_back(page);
  }
  std::sort(changed.begin(), changed.end(), std::greater<>());
  changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
  for (const size_t page : changed) {
    PageState& state = states_[page];
    buckets_->begin_training(page, state.parameters);
    if (is_open(page) || !buckets_->are_transient()) place_slots(page);
    // What they had before they were hooked is this rank's own, as after no_sync().
    if (state.bucket == BucketState::kCollecting) collect(page, state.parameters);
  }
}

void GradientReducer::hook(size_t parameter) {
  hooked_[parameter].hooks = std::make_unique<detail::AccumulateHooks>(
      pages_->parameters()[parameter].parameter.tensor,
      [this, parameter](const std::vector<at::Tensor>& gradients) {
        return before_accumulate(parameter, gradients);
      },
      [this, parameter] { after_accumulate(parameter); });
}

void GradientReducer::restore_hooks() const {
  for (size_t index = 0; index < hooked_.size(); ++index) {
    if (trains(index)) hooked_[index].hooks->restore(pages_->parameters()[index].parameter.tensor);
  }
}

std::vector<size_t> GradientReducer::unfrozen() const {
  std::vector<size_t> parameters;
  for (size_t index = 0; index < hooked_.size(); ++index) {
    if (!trains(index) && pages_->parameters()[index].parameter.tensor.requires_grad()) {
      parameters.push_back(index);
    }
  }
  return parameters;
}

void GradientReducer::begin_training(const std::vector<size_t>& parameters) {
  if (parameters.empty()) return;
  ZP_CHECK(accumulation_ == Accumulation::kNone, "parameter \"", name_of(parameters.front()),
           "\" was unfrozen between the micro-batches of a step, whose sums have nothing of it; "
           "unfreeze it after accumulator.step()");
  ZP_CHECK(backward_ == -1, "parameter \"", name_of(parameters.front()),
           "\" was unfrozen after a backward that did not end; unfreeze it between two steps");
  for (const size_t index : parameters) pages_->begin_training(index);
  hook_what_trains();
}

void GradientReducer::check_all_train() const {
  const std::vector<size_t> missed = unfrozen();
  ZP_CHECK(missed.empty(), "step(): parameter \"", missed.empty() ? "" : name_of(missed.front()),
           "\" requires a gradient, but did not when the wrapped module was called last, so its "
           "gradient is this rank's own; call zero_grad(), and the wrapper, model(x) instead of "
           "model->forward(x), after unfreezing it");
}

}  // namespace zeropage
