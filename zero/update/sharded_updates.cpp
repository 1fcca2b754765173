#include "zero/update/sharded_updates.h"

#include <cmath>
#include <typeinfo>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <c10/util/Type.h>

#include "zero/setup/memory_limits.h"
#include "zero/setup/memory_need.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"

namespace zeropage::zero {

using torch::optim::OptimizerParamGroup;

ShardedUpdates::ShardedUpdates(ShardedModel parameters, torch::optim::Optimizer& optimizer,
                               UpdateAlgorithm algorithm)
    : parameters_(std::move(parameters)),
      factory_(parameters_, std::move(algorithm)),
      witness_(optimizer, class_name()),
      groups_(parameters_.pages, parameters_.options, optimizer.param_groups()),
      agreement_(parameters_.agreement, groups_, class_name(), factory_.algorithm().options) {
  parameters_.memory->check_not_parked("the constructor of an Optimizer");
  check_class_takes_options(optimizer);
  check_memory_holds_states();
  updates_ = std::make_unique<PageUpdates>(parameters_, factory_, groups_);
  groups_.check_agreement(class_name());
  parameters_.gradients->note_optimizer();
  note_facts();
  // Last: what it leaves with the reducer is taken back by its destructor alone.
  pipeline_ = std::make_unique<StepPipeline>(parameters_, groups_, *updates_, factory_.algorithm());
  check_memory_holds_step();
}

ShardedUpdates::~ShardedUpdates() = default;

// A checks its options when it is made, also on a rank that owns nothing.
void ShardedUpdates::check_class_takes_options(const torch::optim::Optimizer& optimizer) const {
  const UpdateAlgorithm& algorithm = factory_.algorithm();
  for (size_t group = 0; algorithm.tensors && group < groups_.size(); ++group) {
    const torch::optim::OptimizerOptions& options = groups_.options(group);
    ZP_CHECK(algorithm.options.type == typeid(options), class_name(), ": parameter group ", group,
             " has ", c10::demangle(typeid(options).name()), ", and the class has ",
             c10::demangle(algorithm.options.type.name()),
             "; give each group options of the class");
  }
  if (!algorithm.make_class_optimizer) return;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    std::vector<OptimizerParamGroup> empty;
    empty.emplace_back(std::vector<at::Tensor>{}, group.options().clone());
    factory_.algorithm().make_class_optimizer(std::move(empty));
  }
}

double ShardedUpdates::states_of_a_parameter() const {
  const UpdateAlgorithm& algorithm = factory_.algorithm();
  if (!algorithm.tensors) return static_cast<double>(algorithm.states);
  double elements = 0;
  double states = 0;
  for (size_t group = 0; group < groups_.size(); ++group) {
    for (const size_t index : groups_.parameters_of(group)) {
      const PlacedParameter& placed = parameters_.pages->parameters()[index];
      const at::IntArrayRef sizes = placed.parameter.tensor.sizes();
      const double of_element = algorithm.tensors->states(groups_.options(group), sizes);
      const Range here = intersection(parameters_.pages->owned(placed.page), placed.range);
      if (here.empty()) continue;
      const bool are_whole = algorithm.tensors->has_whole_states(sizes);
      elements += static_cast<double>(here.numel());
      states += of_element * static_cast<double>(are_whole ? placed.range.numel() : here.numel());
    }
  }
  return elements > 0 ? states / elements : static_cast<double>(algorithm.states);
}

void ShardedUpdates::note_facts() const {
  constexpr int64_t kStatesOfMost = 2;  // of classes that do not say
  const UpdateAlgorithm& algorithm = factory_.algorithm();
  const bool is_fused = static_cast<bool>(algorithm.make_fused) &&
                        (!algorithm.tensors || algorithm.tensors->can_leave());
  const auto states = static_cast<int64_t>(std::ceil(states_of_a_parameter()));
  parameters_.facts->note_optimizer(states == 0 && !is_fused ? kStatesOfMost : states, is_fused);
}

void ShardedUpdates::check_memory_holds_states() const {
  const ParameterPages& pages = *parameters_.pages;
  memory::TierBytes states = pages.plan().states(states_of_a_parameter());
  check_limits_hold(pages.world(), parameters_.options, "the model with its optimizer",
                    pages.plan().held_with_gradients(states_of_a_parameter()),
                    pages.plan().transient_bytes());
  // No backward has made gradients yet.
  states[memory::Tier::kDevice][memory::Kind::kGradient] += pages.plan().gradient_bytes();
  check_device_holds(pages.world(), "the optimizer with gradients",
                     {.persistent = states[memory::Tier::kDevice],
                      .transient_bytes = pages.plan().transient_bytes()});
  if (pages.page_offload()) {
    check_host_holds(pages.world(), "the offloaded optimizer state",
                     states[memory::Tier::kHost].total(), device::read_host_memory());
  }
}

void ShardedUpdates::check_memory_holds_step() const {
  if (!factory_.algorithm().tensors) return;
  const BytePlan& plan = parameters_.pages->plan();
  check_limits_hold(
      parameters_.pages->world(), parameters_.options, c10::str("a step of ", class_name()),
      plan.held_with_gradients(states_of_a_parameter()), pipeline_->transient_bytes());
}

void ShardedUpdates::check_whole(const char* who) const {
  ZP_CHECK(
      error_.empty(), who,
      " after a step that did not end, with parameters of this rank half updated: restart from "
      "the last saved state. It said: ",
      error_);
}

// Steps are enqueued before it is known whether they may be made: the device leaves one out, and the host
// has counted it until it hears of that.
void ShardedUpdates::resolve_verdict() {
  if (!pending_report_) return;
  const bool made = pending_report_->get().skipped == Skipped::kNo;
  pending_report_.reset();
  if (made) return;
  --made_;
  updates_->uncount_step();
}

void ShardedUpdates::set_steps(int64_t steps) {
  resolve_verdict();
  made_ = steps;
  agreement_.set_steps(steps);
  updates_->set_updates(steps);
  if (steps > 0) witness_.enter();
}

void ShardedUpdates::begin_visit() {
  check_whole("reading or writing the optimizer's state");
  parameters_.memory->check_not_parked("reading or writing the optimizer's state");
  witness_.check("reading or writing the optimizer's state");
  resolve_verdict();
  ZP_CHECK(parameters_.options.offload.step != StepWhen::kOneStepLate,
           "options.offload.step: with StepWhen::kOneStepLate a step is always under way, and its "
           "parameters and states are of different steps; to save or load state use "
           "StepWhen::kInStep or StepWhen::kInBackward");
  updates_->adopt(made_);
  ZP_CHECK(!updates_->are_under_way(), "the optimizer's state after a ",
           "backward() that has begun the step (StepWhen::kInBackward): part of it is one step ",
           "ahead; save or load after step()");
}

void ShardedUpdates::visit_states(StateAccess access, const VisitState& visit,
                                  const std::function<void(size_t page)>& end_page) {
  const torch::NoGradGuard no_grad;
  begin_visit();
  for (const auto& of_page : updates_->all()) {
    updates_->visit_states(of_page, access, visit, end_page);
  }
  if (access != StateAccess::kWrite) updates_->frozen_states().visit(visit, end_page);
}

void ShardedUpdates::visit_states_of(size_t page, StateAccess access, const VisitState& visit,
                                     const std::function<void(size_t page)>& end_page) {
  const torch::NoGradGuard no_grad;
  begin_visit();
  if (const auto* const of_page = updates_->find(page)) {
    updates_->visit_states(*of_page, access, visit, end_page);
  } else {
    updates_->frozen_states().visit(page, visit);
    end_page(page);
  }
}

void ShardedUpdates::keep_frozen_states(std::map<size_t, std::vector<OwnedState>> by_page) {
  updates_->frozen_states().keep(std::move(by_page));
}

void ShardedUpdates::step() {
  const memory::SpanScope span(memory::Span::What::kRange, "step");
  const torch::NoGradGuard no_grad;
  check_whole("step()");
  parameters_.memory->check_not_parked("step()");
  resolve_verdict();
  parameters_.memory->check_stream("step()");
  StepGradients& gradients = *parameters_.gradients;
  gradients.look("step()");
  settle_unfrozen(*parameters_.reducer);
  groups_.check_unedited();
  witness_.check("step()");
  // Here too: add_param_group() is not virtual, so a base reference may have added groups.
  updates_->adopt(made_);
  pipeline_->adopt();
  gradients.prepare_seen();
  const HasGradient has_gradient = [&gradients](size_t parameter) {
    return gradients.saw(parameter);
  };
  agreement_.begin_step();
  parameters_.writes->begin_update([this, &gradients](size_t parameter) {
    return gradients.saw(parameter) && groups_.contain(parameter);
  });
  try {
    pipeline_->run(has_gradient, factors_);
    end_step();
  } catch (const std::exception& error) {
    error_ = memory::message_of(error);
    throw;
  }
}

void ShardedUpdates::step_with(const optim::GradientFactors& factors,
                               std::shared_ptr<LateReport> report) {
  resolve_verdict();
  factors_ = factors;
  const auto leave = c10::make_scope_exit([this] { factors_ = {}; });
  step();
  pending_report_ = std::move(report);
}

void ShardedUpdates::end_step() {
  ++made_;
  witness_.enter();
  parameters_.writes->end_update();
  parameters_.gradients->end_step();
  last_step_.synchronize();
  last_step_ = device::Stream::current(parameters_.pages->world().communicator().device()).record();
}

}  // namespace zeropage::zero
