#include "zero/class_update.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/Parallel.h>

#include "memory/charged_block.h"
#include "zero/options.h"

namespace zeropage {
namespace {

using torch::optim::OptimizerParamGroup;

// Values, gradient, two states and two temporaries of that many fp32 elements fit a second-level
// cache of 2 MiB, and a state of them is a whole number of pages with the allocator's header.
constexpr int64_t kSliceNumelPerThread = 65536 - 16;

int64_t longest_slice(const at::Tensor& values) {
  return values.is_cpu() ? kSliceNumelPerThread * at::get_num_threads()
                         : std::numeric_limits<int64_t>::max();
}

// In place, unless the gradient is of a lower precision than the product.
at::Tensor multiplied(const at::Tensor& gradient, double factor) {
  if (factor == 1) return gradient;
  return is_low_precision(gradient.scalar_type()) ? gradient.to(at::kFloat).mul_(factor)
                                                  : gradient.mul_(factor);
}

}  // namespace

void ClassUpdate::add_groups(std::vector<OwnedGroup> groups) {
  // Some classes (Adagrad) make their state at once, and only for the groups they are made with.
  const memory::SurvivorScope state(memory::Kind::kOptimizerState);
  std::vector<OptimizerParamGroup> mirrors;
  for (OwnedGroup& group : groups) mirrors.push_back(mirror(std::move(group)));
  if (!optimizer_) {
    optimizer_ = make_class_optimizer_(std::move(mirrors));
  } else {
    for (const OptimizerParamGroup& added : mirrors) optimizer_->add_param_group(added);
  }
}

// The group as the class sees it: slices instead of parameters.
OptimizerParamGroup ClassUpdate::mirror(OwnedGroup group) {
  const int64_t longest = longest_slice(part_.values);
  std::vector<at::Tensor> values;
  for (const OwnedSlice& slice : group.slices) {
    for (int64_t begin = slice.range.begin; begin < slice.range.end;) {
      const int64_t numel = std::min(longest, slice.range.end - begin);
      const auto of = [&](const at::Tensor& flat) {
        return flat.defined() ? flat.narrow(0, begin, numel) : flat;
      };
      slices_.push_back(
          {slice.parameter, of(part_.values), of(part_.gradient), of(part_.copy_out)});
      values.push_back(slices_.back().values);
      begin += numel;
    }
  }
  return {std::move(values), std::move(group.options)};
}

void ClassUpdate::set_options(size_t group, const torch::optim::OptimizerOptions& options) {
  optimizer_->param_groups()[group].set_options(options.clone());
}

void ClassUpdate::step(const HasGradient& has_gradient, double factor) {
  if (slices_.empty()) return;
  // The first step makes the state; later ones only temporaries.
  const memory::SurvivorScope state(memory::Kind::kOptimizerState);
  for (Slice& slice : slices_) {
    if (!has_gradient(slice.parameter)) continue;
    slice.values.mutable_grad() = multiplied(slice.gradient, factor).to(slice.values.scalar_type());
  }
  optimizer_->step();
  for (Slice& slice : slices_) {
    if (slice.values.grad().defined() && slice.copy_out.defined()) {
      slice.copy_out.copy_(slice.values);
    }
    slice.values.mutable_grad().reset();
  }
}

}  // namespace zeropage
