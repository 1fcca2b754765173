#include "zero/update/sharded_updates.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <torch/serialize/archive.h>

#include "device/named_range.h"
#include "memory/check.h"

namespace zeropage {
namespace {

using torch::optim::OptimizerParamGroup;

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

}  // namespace

ShardedUpdates::ShardedUpdates(ShardedParameters parameters, torch::optim::Optimizer& optimizer,
                               UpdateAlgorithm algorithm)
    : param_groups_(optimizer.param_groups()),
      parameters_(std::move(parameters)),
      factory_(parameters_, std::move(algorithm)),
      grouped_(parameters_.pages->parameters().size()) {
  // A checks its options when it is made, also on a rank that owns nothing.
  for (const OptimizerParamGroup& group : param_groups_) {
    std::vector<OptimizerParamGroup> empty;
    empty.emplace_back(std::vector<at::Tensor>{}, group.options().clone());
    factory_.algorithm().make_class_optimizer(std::move(empty));
  }
  check_memory_holds_states();
  make_updates();
  adopt_groups();
  check_agreement();
  parameters_.gradients->note_optimizer();
  // Last: what it leaves with the reducer is taken back by the destructor alone.
  step_offloaded_in_backward();
}

void ShardedUpdates::check_memory_holds_states() const {
  const ParameterPages& pages = *parameters_.pages;
  MemoryNeed need{.transient_bytes = parameters_.need.transient_bytes};
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    if (!pages.layouts()[page].requires_grad) continue;
    const int64_t bytes = factory_.state_bytes(page) * factory_.algorithm().states;
    if (!pages.offloads_optimizer(page)) {
      need.persistent[memory::Kind::kOptimizerState] += bytes;
    } else if (parameters_.options.offload.optimizer == memory::Tier::kHost) {
      need.host[memory::Kind::kOptimizerState] += bytes;
    }
  }
  check_device_holds(pages.world(), "the optimizer", need, /*held_bytes=*/0);
  if (pages.page_offload()) {
    check_host_holds(pages.world(), "the offloaded optimizer state", need.host.total(),
                     memory::read_host_memory());
  }
}

void ShardedUpdates::make_updates() {
  const ParameterPages& pages = *parameters_.pages;
  if (pages.page_offload()) {
    ZP_CHECK(static_cast<bool>(factory_.algorithm().make_fused),
             "options.offload.optimizer: ", class_name(),
             " has no fused form, AdamW, Adam, SGD, Adagrad and Lion have; keep its state on the "
             "device");
    steps_ = std::make_unique<OffloadedSteps>(
        pages.page_offload(), pages.page_offload()->options().step == StepWhen::kOneStepLate
                                  ? OffloadedSteps::Publish::kWhenTold
                                  : OffloadedSteps::Publish::kAtOnce);
  }
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    if (!pages.layouts()[page].requires_grad) continue;
    if (pages.offloads_optimizer(page)) {
      updates_.push_back(make_offloaded(page, factory_.owned_part(page)));
    } else {
      updates_.push_back({page, factory_.make(page)});
    }
  }
}

// Those that were frozen when the optimizer was made, and train now.
void ShardedUpdates::adopt_pages() {
  const ParameterPages& pages = *parameters_.pages;
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    const auto at = std::find_if(updates_.begin(), updates_.end(),
                                 [page](const OfPage& of_page) { return of_page.page >= page; });
    if (!pages.layouts()[page].requires_grad || (at != updates_.end() && at->page == page)) {
      continue;
    }
    TORCH_INTERNAL_ASSERT(!pages.offloads_optimizer(page));
    const auto made = updates_.insert(at, {page, factory_.make(page)});
    std::vector<OwnedGroup> groups;
    for (size_t group = 0; group < adopted_groups_; ++group) {
      groups.push_back(owned_group(page, group, parameters_of_group(group)));
    }
    made->update->add_groups(std::move(groups));
    made->update->set_updates(made_);
  }
}

const ShardedUpdates::OfPage* ShardedUpdates::offloaded(size_t page) const {
  const auto at = std::find_if(updates_.begin(), updates_.end(),
                               [page](const OfPage& of_page) { return of_page.page == page; });
  return at != updates_.end() && at->part ? &*at : nullptr;
}

ShardedUpdates::OfPage ShardedUpdates::make_offloaded(size_t page, OwnedPart part) {
  const ParameterPages& pages = *parameters_.pages;
  PageOffload& page_offload = *pages.page_offload();
  OffloadedSteps::Part moved{.page = page,
                             .name = pages.layouts()[page].name,
                             .values = part.values,
                             .gradient = part.gradient};
  if (pages.master_weights(page).defined()) {
    moved.values = pages.master_weights(page);
    (pages.offloads_parameters(page) ? part.copy_out : moved.to) = part.values;
    part.adopts_copy = pages.offloads_parameters(page);
  }
  if (!parameters_.gradients->is_offloaded(page)) {
    moved.device_gradient = part.gradient;
    moved.gradient = page_offload.gradients().add(
        page, part.gradient.numel(), part.gradient.scalar_type(), 0, memory::Kind::kGradient);
  }
  part.values = moved.values;
  part.gradient = moved.gradient;
  part.states = &page_offload.states();
  part.page = page;
  const size_t index = steps_->add(std::move(moved));
  if (!part.copy_out.defined()) part.copy_out = steps_->copy_out(index);
  return {page, factory_.make_fused(std::move(part)), index};
}

ShardedUpdates::~ShardedUpdates() {
  if (follows_) parameters_.reducer->set_follower({});
}

// Follows gradients into the middle of a backward.
void ShardedUpdates::step_offloaded_in_backward() {
  if (!steps_) return;
  const StepWhen when = parameters_.options.offload.step;
  ZP_CHECK(
      when == StepWhen::kInStep || parameters_.reducer->follower().is_empty(),
      "options.offload.step: another optimizer of this model follows backward already; make one "
      "optimizer with several parameter groups, or use StepWhen::kInStep");
  follows_ = when != StepWhen::kInStep;
  if (when == StepWhen::kInBackward) {
    const auto step = [this](size_t page, const HasGradient& has, double factor) {
      const OfPage* const of_page = offloaded(page);
      if (of_page == nullptr) return;
      parameters_.pages->begin_update_in_backward(page, has);
      start_offloaded(*of_page, has, factor);
    };
    parameters_.reducer->set_follower({.on_reduced = step, .before_close = nullptr});
  } else if (when == StepWhen::kOneStepLate) {
    // The update of the step before reads it.
    const auto wait = [this](size_t page) {
      if (const OfPage* const of_page = offloaded(page)) steps_->wait(*of_page->part);
    };
    parameters_.reducer->set_follower({.on_reduced = nullptr, .before_close = wait});
  }
}

void ShardedUpdates::check_agreement() const {
  std::vector<std::string> lines = {c10::str("optimizer: ", class_name()),
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

std::vector<size_t> ShardedUpdates::parameters_of_group(size_t group) const {
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
void ShardedUpdates::adopt_groups() {
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
  for (const OfPage& of_page : updates_) {
    std::vector<OwnedGroup> groups;
    for (size_t i = 0; i < by_group.size(); ++i) {
      groups.push_back(owned_group(of_page.page, adopted_groups_ + i, by_group[i]));
    }
    of_page.update->add_groups(std::move(groups));
  }
  adopted_groups_ = param_groups_.size();
}

// The group as far as this rank owns it in that page.
OwnedGroup ShardedUpdates::owned_group(size_t page, size_t group,
                                       const std::vector<size_t>& parameters) const {
  const ParameterPages& pages = *parameters_.pages;
  const Range owned = pages.owned(page);
  OwnedGroup result{{}, param_groups_[group].options().clone()};
  for (const size_t index : parameters) {
    const PlacedParameter& placed = pages.parameters()[index];
    if (placed.page != page) continue;
    const Range range = intersection(owned, placed.range);
    if (range.empty()) continue;
    const Range padding = intersection(owned, pages.layouts()[page].padding_after(range.end));
    result.shards.push_back({index,
                             {range.begin - owned.begin, range.end - owned.begin},
                             range.begin - placed.range.begin,
                             padding.numel(),
                             state_format_of(parameters_.options, placed.range.numel()),
                             !placed.parameter.tensor.requires_grad()});
  }
  return result;
}

void ShardedUpdates::check_whole(const char* who) const {
  ZP_CHECK(
      error_.empty(), who,
      " after a step that did not end, with parameters of this rank half updated: restart from "
      "the last saved state. It said: ",
      error_);
}

void ShardedUpdates::set_steps(int64_t steps) {
  hear();
  made_ = steps;
  for (const OfPage& of_page : updates_) of_page.update->set_updates(steps);
}

void ShardedUpdates::begin_visit() {
  check_whole("reading or writing the optimizer's state");
  hear();
  ZP_CHECK(parameters_.options.offload.step != StepWhen::kOneStepLate,
           "options.offload.step: with kOneStepLate a step is always under way, and its parameters "
           "and states are of different steps; to save or load state use kInStep or kInBackward");
  adopt_pages();
  adopt_groups();
  for (const OfPage& of_page : updates_) {
    ZP_CHECK(!of_page.part || !steps_->started(*of_page.part), "the optimizer's state after a ",
             "backward() that has begun the step (StepWhen::kInBackward): part of it is one step ",
             "ahead; save or load after step()");
  }
}

void ShardedUpdates::visit_page(const OfPage& of_page, StateAccess access, const VisitState& visit,
                                const std::function<void(size_t page)>& end_page) {
  const auto use =
      access == StateAccess::kWrite ? TierStorage::Use::kWrite : TierStorage::Use::kRead;
  set_options(of_page);
  const bool is_away = of_page.part && access != StateAccess::kDescribe;
  PageOffload* const away = is_away ? parameters_.pages->page_offload().get() : nullptr;
  if (away != nullptr) away->fetch_for_update(of_page.page);
  const auto release = c10::make_scope_exit([&] {
    if (away != nullptr) away->release_after_update(of_page.page, use);
  });
  of_page.update->visit_states(access, [&](OwnedState& state) { visit(of_page.page, state); });
  if (end_page) end_page(of_page.page);
}

void ShardedUpdates::visit_states(StateAccess access, const VisitState& visit,
                                  const std::function<void(size_t page)>& end_page) {
  const torch::NoGradGuard no_grad;
  begin_visit();
  for (const OfPage& of_page : updates_) visit_page(of_page, access, visit, end_page);
}

void ShardedUpdates::visit_states_of(size_t page, StateAccess access, const VisitState& visit,
                                     const std::function<void(size_t page)>& end_page) {
  const torch::NoGradGuard no_grad;
  begin_visit();
  for (const OfPage& of_page : updates_) {
    if (of_page.page == page) return visit_page(of_page, access, visit, end_page);
  }
  end_page(page);
}

void ShardedUpdates::step() {
  const torch::NoGradGuard no_grad;
  check_whole("step()");
  hear();
  parameters_.pages->check_can_update();
  parameters_.reducer->training().check_all_train();
  adopt_pages();
  adopt_groups();
  parameters_.gradients->prepare();
  parameters_.pages->begin_update();
  try {
    update();
    end_step();
  } catch (const std::exception& error) {
    error_ = memory::message_of(error);
    throw;
  }
}

void ShardedUpdates::set_options(const OfPage& of_page) const {
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    of_page.update->set_options(group, param_groups_[group].options());
  }
}

// has_gradient: asked here only.
void ShardedUpdates::start_offloaded(const OfPage& of_page, const HasGradient& has_gradient,
                                     double factor) {
  const Range owned = parameters_.pages->owned(of_page.page);
  std::vector<bool> has(grouped_.size());
  std::vector<Range> unchanged;
  for (size_t index = 0; index < has.size(); ++index) {
    const PlacedParameter& placed = parameters_.pages->parameters()[index];
    if (placed.page != of_page.page) continue;
    has[index] = grouped_[index] && has_gradient(index);
    const Range range = intersection(owned, placed.range);
    if (has[index] || range.empty()) continue;
    unchanged.push_back({range.begin - owned.begin, range.end - owned.begin});
  }
  set_options(of_page);
  steps_->start(
      *of_page.part,
      [update = of_page.update.get(), has = std::move(has), factor] {
        update->step([&has](size_t parameter) { return has[parameter]; }, {.scale = factor});
      },
      parameters_.gradients->arrival(of_page.page), std::move(unchanged));
}

void ShardedUpdates::update_on_device(const OfPage& of_page) {
  set_options(of_page);
  try {
    of_page.update->step([this](size_t parameter) { return parameters_.gradients->has(parameter); },
                         factors_);
  } catch (c10::Error& error) {
    error.add_context(c10::str(memory::owner_prefix(), "updating page \"",
                               parameters_.pages->layouts()[of_page.page].name, "\""));
    throw;
  }
}

void ShardedUpdates::update() {
  const memory::NamedRange range("ShardedOptimizer::update");
  const bool late = parameters_.options.offload.step == StepWhen::kOneStepLate;
  for (const OfPage& of_page : updates_) {
    if (!of_page.part) continue;
    if (late && steps_->started(*of_page.part)) {
      steps_->take(*of_page.part);
      steps_->publish(*of_page.part);
    }
    if (!steps_->started(*of_page.part)) {
      start_offloaded(
          of_page, [this](size_t parameter) { return parameters_.gradients->has(parameter); },
          factors_.scale);
    }
  }
  std::vector<comm::Pending> in_flight;
  for (const OfPage& of_page : updates_) {
    if (!of_page.part) {
      update_on_device(of_page);
    } else if (!late) {
      steps_->take(*of_page.part);
    }
    in_flight.push_back(parameters_.pages->start_gather(of_page.page));
  }
  for (const comm::Pending& pending : in_flight) pending.wait();
}

void ShardedUpdates::end_step() {
  std::vector<bool> updated = grouped_;
  for (size_t index = 0; index < updated.size(); ++index) {
    updated[index] = updated[index] && parameters_.gradients->has(index);
  }
  ++made_;
  parameters_.pages->end_update(updated);
  parameters_.gradients->end_step();
  last_step_.synchronize();
  last_step_ = memory::Stream::current(parameters_.pages->world().communicator().device()).record();
}

}  // namespace zeropage
