#include "zero/gradients/step_look.h"

#include <algorithm>
#include <utility>

#include "zero/parameter_scan.h"

namespace zeropage::zero {

StepLook::StepLook(std::shared_ptr<const GradientReducer> reducer,
                   std::shared_ptr<const ModulePlacement> in_place)
    : reducer_(std::move(reducer)),
      in_place_(std::move(in_place)),
      seen_(in_place_->parameters().size()) {}

// A parameter's tensor, then what hangs on it, then its gradient: each is asked for when the one before is there.
void StepLook::ask_ahead_of(size_t parameter) const {
  const PlacedParameters& parameters = in_place_->parameters();
  const size_t count = parameters.size();
  ask_ahead(parameter, count, 3, [&](size_t other) {
    ask_for(&parameters.impl(other));
    __builtin_prefetch(in_place_->storage(other));
  });
  ask_ahead(parameter, count, 2,
            [&](size_t other) { __builtin_prefetch(parameters.impl(other).autograd_meta()); });
  ask_ahead(parameter, count, 1, [&](size_t other) {
    const c10::TensorImpl& impl = parameters.impl(other);
    if (impl.autograd_meta() != nullptr) ask_for(impl.grad().unsafeGetTensorImpl());
  });
}

SeenGradient StepLook::see(size_t parameter) const {
  const TrainingParameters& training = reducer_->training();
  if (!training.contains(parameter)) return SeenGradient::kNone;
  const at::Tensor& gradient = training.gradient(parameter);
  if (!gradient.defined()) return SeenGradient::kNone;
  const bool is_ours = reducer_->buckets().reduced().is(parameter, gradient);
  return is_ours ? SeenGradient::kReduced : SeenGradient::kOther;
}

void StepLook::at_all(const char* who) {
  trained_ = reducer_->training().all().size();
  const size_t elsewhere = first_in_parallel(seen_.size(), [&](size_t i) {
    ask_ahead_of(i);
    seen_[i] = see(i);
    return !in_place_->has(i);
  });
  if (elsewhere != seen_.size()) in_place_->throw_elsewhere(elsewhere, who);
}

void StepLook::at_gradients() {
  trained_ = reducer_->training().all().size();
  for_each_in_parallel(seen_.size(), [&](size_t i) {
    ask_ahead_of(i);
    seen_[i] = see(i);
  });
}

std::vector<size_t> StepLook::others() const {
  std::vector<size_t> others;
  // There is seldom one.
  for (auto at = seen_.begin();
       (at = std::find(at, seen_.end(), SeenGradient::kOther)) != seen_.end(); ++at) {
    others.push_back(static_cast<size_t>(at - seen_.begin()));
  }
  return others;
}

}  // namespace zeropage::zero
