#include "zero/sharded_optimizer.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include <torch/serialize/archive.h>

#include "memory/check.h"
#include "memory/cpu_allocator.h"

namespace zeropage {
namespace {

using torch::optim::OptimizerParamGroup;

// Values, gradient, two states and two temporaries of that many fp32 elements fit a second-level
// cache of 2 MiB, and a state of them is a whole number of pages with the allocator's header.
constexpr int64_t kSliceNumelPerThread = 65536 - 16;

// The options as the class itself would save them; a user's class need not know how.
std::string options_digest(const torch::optim::OptimizerOptions& options) {
  try {
    torch::serialize::OutputArchive archive;
    options.serialize(archive);
    std::ostringstream out;
    archive.save_to(out);
    return std::to_string(std::hash<std::string>{}(out.str()));
  } catch (const std::exception&) {
    return "not serializable";
  }
}

std::string learning_rate(const torch::optim::OptimizerOptions& options) {
  try {
    return c10::str(options.get_lr());
  } catch (const std::exception&) {
    return "unknown";
  }
}

std::unique_ptr<torch::optim::OptimizerOptions> options_of(
    const OptimizerParamGroup& group, const torch::optim::OptimizerOptions& defaults) {
  return group.has_options() ? group.options().clone() : defaults.clone();
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(ShardedParameters parameters, const Groups& groups,
                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                   Factory factory, std::string class_name)
    : Optimizer(groups, std::move(defaults)),
      parameters_(std::move(parameters)),
      factory_(std::move(factory)),
      class_name_(std::move(class_name)),
      grouped_(parameters_.pages->parameters().size()) {
  // A checks its options when it is made, also on a rank that owns nothing.
  for (const OptimizerParamGroup& group : param_groups_) {
    Groups empty;
    empty.emplace_back(std::vector<at::Tensor>{}, options_of(group, *defaults_));
    factory_(std::move(empty));
  }
  for (size_t page = 0; page < parameters_.pages->layouts().size(); ++page) {
    if (!parameters_.pages->layouts()[page].requires_grad) continue;
    page_optimizers_.push_back({page, {}, nullptr});
  }
  adopt_groups();
  check_agreement();
}

void ShardedOptimizer::check_agreement() const {
  std::vector<std::string> lines = {c10::str("optimizer: ", class_name_),
                                    c10::str("parameter groups: ", param_groups_.size())};
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const torch::optim::OptimizerOptions& options = param_groups_[group].options();
    const std::string prefix = c10::str("group ", group, " ");
    lines.push_back(c10::str(prefix, "learning rate: ", learning_rate(options)));
    lines.push_back(c10::str(prefix, "options digest: ", options_digest(options)));
    for (const size_t index : parameters_of_group(group)) {
      lines.push_back(
          c10::str(prefix, "parameter: ", parameters_.pages->parameters()[index].parameter.name()));
    }
  }
  parameters_.pages->world().check_agreement("the optimizer", lines);
}

std::vector<size_t> ShardedOptimizer::parameters_of_group(size_t group) const {
  std::vector<size_t> indices;  // each parameter once
  const auto& tensors = param_groups_[group].params();
  for (size_t position = 0; position < tensors.size(); ++position) {
    const int64_t index = parameters_.pages->index_of(tensors[position]);
    ZP_CHECK(index >= 0, "parameter ", position, " of group ", group, " (sizes ",
             tensors[position].sizes(),
             ") is not a parameter of the wrapped module; optimizers step what was wrapped only");
    // LibTorch lists a tied parameter under each of its names.
    if (std::find(indices.begin(), indices.end(), static_cast<size_t>(index)) == indices.end()) {
      indices.push_back(static_cast<size_t>(index));
    }
  }
  return indices;
}

// Also called in step(): add_param_group() is not virtual, so a base reference may have added
// groups.
void ShardedOptimizer::adopt_groups() {
  if (adopted_groups_ == param_groups_.size()) return;
  std::vector<std::vector<size_t>> by_group;
  for (size_t group = adopted_groups_; group < param_groups_.size(); ++group) {
    by_group.push_back(parameters_of_group(group));
    for (const size_t index : by_group.back()) {
      ZP_CHECK(!grouped_[index], "parameter \"",
               parameters_.pages->parameters()[index].parameter.name(),
               "\" appears in two parameter groups; keep one");
      grouped_[index] = true;
    }
  }
  // Some classes (Adagrad) make their state at once, and only for the groups they are made with.
  const memory::SurvivorScope state(memory::Kind::kOptimizerState);
  for (PageOptimizer& of_page : page_optimizers_) {
    Groups mirrors;
    for (size_t i = 0; i < by_group.size(); ++i) {
      mirrors.push_back(mirror(of_page, adopted_groups_ + i, by_group[i]));
    }
    if (!of_page.optimizer) {
      of_page.optimizer = factory_(std::move(mirrors));
    } else {
      for (const OptimizerParamGroup& added : mirrors) of_page.optimizer->add_param_group(added);
    }
  }
  adopted_groups_ = param_groups_.size();
}

// The group as the page's optimizer sees it: slices instead of parameters.
OptimizerParamGroup ShardedOptimizer::mirror(PageOptimizer& of_page, size_t group,
                                             const std::vector<size_t>& parameters) {
  const Range owned = parameters_.pages->owned(of_page.page);
  const at::Tensor& owned_values = parameters_.pages->owned_values(of_page.page);
  const at::Tensor& owned_gradient = parameters_.reducer->owned_gradient(of_page.page);
  const int64_t slice_numel = kSliceNumelPerThread * at::get_num_threads();
  std::vector<at::Tensor> values;
  for (const size_t index : parameters) {
    const PlacedParameter& placed = parameters_.pages->parameters()[index];
    if (placed.page != of_page.page || !placed.parameter.tensor.requires_grad()) continue;
    const Range range = intersection(owned, placed.range);
    for (int64_t begin = range.begin; begin < range.end; begin += slice_numel) {
      const int64_t numel = std::min(slice_numel, range.end - begin);
      of_page.slices.push_back({index, owned_values.narrow(0, begin - owned.begin, numel),
                                owned_gradient.narrow(0, begin - owned.begin, numel)});
      values.push_back(of_page.slices.back().values);
    }
  }
  return {std::move(values), param_groups_[group].options().clone()};
}

void ShardedOptimizer::take_over_options(PageOptimizer& of_page) const {
  auto& mirrors = of_page.optimizer->param_groups();
  for (size_t group = 0; group < mirrors.size(); ++group) {
    mirrors[group].set_options(param_groups_[group].options().clone());
  }
}

torch::Tensor ShardedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  adopt_groups();
  parameters_.pages->check_parameters_are_in_place();
  GradientReducer& reducer = *parameters_.reducer;
  reducer.finish();
  parameters_.pages->begin_update();
  std::vector<comm::Pending> in_flight;
  for (PageOptimizer& of_page : page_optimizers_) {
    for (Slice& slice : of_page.slices) {
      if (reducer.has_gradient(slice.parameter)) slice.values.mutable_grad() = slice.gradient;
    }
    if (!of_page.slices.empty()) {
      take_over_options(of_page);
      // The first step makes the state; later ones only temporaries.
      const memory::SurvivorScope state(memory::Kind::kOptimizerState);
      of_page.optimizer->step();
    }
    for (Slice& slice : of_page.slices) slice.values.mutable_grad().reset();
    in_flight.push_back(parameters_.pages->start_gather(of_page.page));
  }
  for (const comm::Pending& pending : in_flight) pending.wait();
  parameters_.pages->end_update();
  note_changes();
  reducer.begin_cycle();
  return loss;
}

// We write through the pages, behind autograd's back: a backward over a graph from before the step
// must still be refused.
void ShardedOptimizer::note_changes() const {
  const auto& parameters = parameters_.pages->parameters();
  for (size_t index = 0; index < parameters.size(); ++index) {
    if (!grouped_[index] || !parameters_.reducer->has_gradient(index)) continue;
    parameters[index].parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void ShardedOptimizer::save(torch::serialize::OutputArchive&) const {
  ZP_THROW(
      "torch::save of a sharded optimizer: each rank holds a part of the state, and this version "
      "does not "
      "gather it; save the module's weights instead (torch::save(model.module(), path), at stage 3 "
      "under a GatheredParameters guard)");
}

void ShardedOptimizer::load(torch::serialize::InputArchive&) {
  ZP_THROW(
      "torch::load into a sharded optimizer is not in this version; load the module's weights "
      "before wrapping");
}

}  // namespace zeropage
