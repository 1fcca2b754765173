#include "zero/gradients/bucket.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>

#include "parallel/slice_gradient.h"
#include "parallel/slice_mark.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

// From here on one launch over the whole bucket takes less time than one for each gap.
constexpr size_t kMostLaunches = 8;

}  // namespace

std::vector<Range> gaps_between(const ParameterPages& pages, size_t page,
                                const std::vector<size_t>& parameters) {
  std::vector<Range> taken;
  for (const size_t index : parameters) {
    const PlacedParameter& placed = pages.parameters()[index];
    // A strided parameter may have gaps of its own.
    const bool is_dense = placed.parameter.tensor.numel() == placed.range.numel();
    if (is_dense) taken.push_back(placed.range);
  }
  std::sort(taken.begin(), taken.end(),
            [](const Range& left, const Range& right) { return left.begin < right.begin; });
  const int64_t end = pages.layouts()[page].padded_numel(pages.shards(page).size());
  taken.push_back({end, end});
  std::vector<Range> gaps;
  int64_t begin = 0;
  for (const Range& range : taken) {
    if (range.begin > begin) gaps.push_back({begin, range.begin});
    begin = std::max(begin, range.end);
  }
  return gaps;
}

void zero_gaps(const at::Tensor& bucket, const std::vector<Range>& gaps) {
  if (bucket.is_meta()) return;
  if (bucket.is_cpu()) {
    // Gaps are short and many where parameters are small: an operator for each would cost more than the gradients.
    auto* const data = static_cast<char*>(bucket.mutable_data_ptr());
    const auto element = static_cast<int64_t>(bucket.element_size());
    for (const Range& gap : gaps) {
      std::memset(data + gap.begin * element, 0, static_cast<size_t>(gap.numel() * element));
    }
    return;
  }
  if (gaps.size() > kMostLaunches) {
    bucket.zero_();
    return;
  }
  for (const Range& gap : gaps) bucket.narrow(0, gap.begin, gap.numel()).zero_();
}

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

void GradientSlots::begin_training() {
  TORCH_INTERNAL_ASSERT(!are_open());
  const std::vector<Slot> known = std::move(slots_);
  slots_.clear();
  for (const size_t index : training_.of_page(page_)) slots_.push_back({.parameter = index});
  for (const Slot& slot : known) of(slot.parameter) = slot;
  buckets_.begin_training(page_, training_.of_page(page_));
}

// A p.grad() that is in its place stays the tensor that it is.
void GradientSlots::place(const at::Tensor& bucket) {
  bucket_ = bucket;
  for (Slot& slot : slots_) {
    const PlacedParameter& placed = training_.placed(slot.parameter);
    const at::Tensor& gradient = training_.gradient(slot.parameter);
    const bool is_there =
        gradient.defined() && gradient.is_alias_of(bucket) && is_slot(gradient, placed);
    slot.view = is_there ? gradient : slot_in(bucket, placed);
    if (!is_there) parallel::mark_as_gradient(slot.view, placed.parameter.tensor);
  }
}

bool GradientSlots::any_in(const at::Tensor& bucket) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    const at::Tensor& gradient = training_.gradient(slot.parameter);
    return gradient.defined() && gradient.has_storage() && gradient.is_alias_of(bucket);
  });
}

void GradientSlots::open(Collect collect) {
  if (!are_open()) reopen_if_used();
  if (!are_open()) place(buckets_.open(page_, collect));
}

void GradientSlots::reopen() {
  if (are_open()) return;
  if (const at::Tensor left = buckets_.reopen(page_); left.defined()) place(left);
}

void GradientSlots::reopen_if_used() {
  if (are_open()) return;
  const at::Tensor left = buckets_.reopen(page_);
  if (!left.defined()) return;
  if (any_in(left)) {
    place(left);
  } else {
    // Somebody keeps a gradient that was zeroed, which is not to be written to.
    buckets_.let_go(page_);
  }
}

void GradientSlots::close() {
  bucket_.reset();
  for (Slot& slot : slots_) {
    slot.view.reset();
    training_.gradient(slot.parameter).reset();
  }
}

void GradientSlots::let_go() {
  bucket_.reset();
  for (Slot& slot : slots_) slot.view.reset();
  buckets_.let_go(page_);
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
  const parallel::SlicesAsTheyAre scope;
  at::_foreach_copy_(views, gradients);
  for (const size_t index : parameters) training_.gradient(index) = of(index).view;
}

// What lies between two neighbours is zero already.
void GradientSlots::zero(const std::vector<size_t>& parameters) {
  if (parameters.empty()) return;
  struct Place {
    Range range;
    bool is_zeroed;
  };
  std::vector<Place> places;
  for (const Slot& slot : slots_) {
    const bool is_zeroed = std::binary_search(parameters.begin(), parameters.end(), slot.parameter);
    places.push_back({training_.placed(slot.parameter).range, is_zeroed});
  }
  std::sort(places.begin(), places.end(), [](const Place& left, const Place& right) {
    return left.range.begin < right.range.begin;
  });
  std::vector<at::Tensor> together;
  for (auto first = places.begin(); first != places.end();) {
    const auto end = std::find_if(first, places.end(), [&](const Place& place) {
      return place.is_zeroed != first->is_zeroed;
    });
    const int64_t begin = first->range.begin;
    if (first->is_zeroed) {
      together.push_back(bucket_.narrow(0, begin, (end - 1)->range.end - begin));
    }
    first = end;
  }
  at::_foreach_zero_(together);
}

}  // namespace zeropage::zero
