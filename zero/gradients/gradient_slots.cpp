#include "zero/gradients/gradient_slots.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/_foreach_copy.h>

#include "memory/check.h"

namespace zeropage {

GradientSlots::GradientSlots(size_t page, const TrainingParameters& training,
                             GradientBuckets& buckets)
    : page_(page), training_(training), buckets_(buckets) {}

GradientSlots::Slot& GradientSlots::of(size_t parameter) {
  const auto at =
      std::lower_bound(slots_.begin(), slots_.end(), parameter,
                       [](const Slot& slot, size_t searched) { return slot.parameter < searched; });
  TORCH_INTERNAL_ASSERT(at != slots_.end() && at->parameter == parameter);
  return *at;
}

void GradientSlots::begin_training(Collect collect) {
  const bool were_open = are_open();
  const std::vector<Slot> known = std::move(slots_);
  slots_.clear();
  for (const size_t index : training_.of_page(page_)) slots_.push_back({.parameter = index});
  for (const Slot& slot : known) of(slot.parameter) = slot;
  buckets_.begin_training(page_, training_.of_page(page_));
  if (were_open || !buckets_.are_transient()) place(collect);
}

void GradientSlots::place(Collect collect) {
  const at::Tensor& bucket = buckets_.open(page_, collect);
  for (Slot& slot : slots_) slot.view = slot_in(bucket, training_.placed(slot.parameter));
}

void GradientSlots::open(Collect collect) {
  if (!are_open()) place(collect);
}

void GradientSlots::close() {
  for (Slot& slot : slots_) {
    slot.view.reset();
    training_.gradient(slot.parameter).reset();
  }
}

std::vector<size_t> GradientSlots::outside(std::vector<size_t> parameters) {
  std::erase_if(parameters, [this](size_t index) {
    const at::Tensor& gradient = training_.gradient(index);
    if (!gradient.defined()) return true;
    ZP_CHECK(
        gradient.layout() == at::kStrided, "the gradient of parameter \"", training_.name(index),
        "\" is ", gradient.layout(),
        "; sparse gradients are not reduced, make the module produce dense ones (sparse(false))");
    const at::Tensor& view = of(index).view;
    return view.defined() && same_elements(gradient, view);
  });
  return parameters;
}

// A call a page: its slots are of one dtype, which LibTorch's kernel for lists takes for granted.
void GradientSlots::collect(const std::vector<size_t>& parameters) {
  std::vector<at::Tensor> gradients, views;
  for (const size_t index : parameters) {
    gradients.push_back(training_.gradient(index));
    views.push_back(of(index).view);
  }
  at::_foreach_copy_(views, gradients);
  for (const size_t index : parameters) training_.gradient(index) = of(index).view;
}

}  // namespace zeropage
