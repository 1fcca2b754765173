#include "zero/update/sharded_optimizer.h"

#include <utility>

#include <c10/util/ScopeExit.h>

#include "memory/check.h"
#include "zero/setup/memory_need.h"

namespace zeropage {

using torch::optim::OptimizerParamGroup;

ShardedOptimizer::ShardedOptimizer(ShardedParameters parameters, const Groups& groups,
                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                   Algorithm algorithm)
    : Optimizer(groups, std::move(defaults)),
      parameters_(std::move(parameters)),
      factory_(parameters_, std::move(algorithm)),
      groups_(parameters_.pages, parameters_.options, param_groups_) {
  check_class_takes_options();
  check_memory_holds_states();
  updates_ = std::make_unique<PageUpdates>(parameters_, factory_, groups_);
  groups_.check_agreement(class_name());
  parameters_.gradients->note_optimizer();
  // Last: what it leaves with the reducer is taken back by its destructor alone.
  pipeline_ = std::make_unique<StepPipeline>(parameters_, groups_, *updates_);
}

ShardedOptimizer::~ShardedOptimizer() = default;

// A checks its options when it is made, also on a rank that owns nothing.
void ShardedOptimizer::check_class_takes_options() const {
  for (const OptimizerParamGroup& group : param_groups_) {
    Groups empty;
    empty.emplace_back(std::vector<at::Tensor>{},
                       group.has_options() ? group.options().clone() : defaults_->clone());
    factory_.algorithm().make_class_optimizer(std::move(empty));
  }
}

void ShardedOptimizer::check_memory_holds_states() const {
  const ParameterPages& pages = *parameters_.pages;
  const TierBytes states = pages.plan().states(states_of_a_parameter());
  check_device_holds(pages.world(), "the optimizer",
                     {.persistent = states[memory::Tier::kDevice],
                      .transient_bytes = pages.plan().transient_bytes()});
  if (pages.page_offload()) {
    check_host_holds(pages.world(), "the offloaded optimizer state",
                     states[memory::Tier::kHost].total(), memory::read_host_memory());
  }
}

void ShardedOptimizer::check_whole(const char* who) const {
  ZP_CHECK(
      error_.empty(), who,
      " after a step that did not end, with parameters of this rank half updated: restart from "
      "the last saved state. It said: ",
      error_);
}

// Steps are enqueued before it is known whether they may be made: the device leaves one out, and the host
// has counted it until it hears of that.
void ShardedOptimizer::hear() {
  if (!untold_) return;
  const bool made = untold_->get().skipped == Skipped::kNo;
  untold_.reset();
  if (made) return;
  --made_;
  updates_->uncount_step();
}

void ShardedOptimizer::set_steps(int64_t steps) {
  hear();
  made_ = steps;
  updates_->set_updates(steps);
}

void ShardedOptimizer::begin_visit() {
  check_whole("reading or writing the optimizer's state");
  hear();
  ZP_CHECK(parameters_.options.offload.step != StepWhen::kOneStepLate,
           "options.offload.step: with kOneStepLate a step is always under way, and its parameters "
           "and states are of different steps; to save or load state use kInStep or kInBackward");
  updates_->adopt(made_);
  ZP_CHECK(!updates_->are_under_way(), "the optimizer's state after a ",
           "backward() that has begun the step (StepWhen::kInBackward): part of it is one step ",
           "ahead; save or load after step()");
}

void ShardedOptimizer::visit_states(StateAccess access, const VisitState& visit,
                                    const std::function<void(size_t page)>& end_page) {
  const torch::NoGradGuard no_grad;
  begin_visit();
  for (const auto& of_page : updates_->all()) {
    updates_->visit_states(of_page, access, visit, end_page);
  }
}

void ShardedOptimizer::visit_states_of(size_t page, StateAccess access, const VisitState& visit,
                                       const std::function<void(size_t page)>& end_page) {
  const torch::NoGradGuard no_grad;
  begin_visit();
  for (const auto& of_page : updates_->all()) {
    if (of_page.page == page) return updates_->visit_states(of_page, access, visit, end_page);
  }
  end_page(page);
}

torch::Tensor ShardedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  check_whole("step()");
  hear();
  parameters_.memory->check_stream("step()");
  parameters_.in_place->check("step()");
  parameters_.reducer->training().check_all_train();
  // Here too: add_param_group() is not virtual, so a base reference may have added groups.
  updates_->adopt(made_);
  parameters_.gradients->prepare();
  parameters_.writes->begin_update();
  try {
    pipeline_->run(factors_);
    end_step();
  } catch (const std::exception& error) {
    error_ = memory::message_of(error);
    throw;
  }
  return loss;
}

void ShardedOptimizer::step_with(const offload::GradientFactors& factors,
                                 std::shared_ptr<LateReport> report) {
  hear();
  factors_ = factors;
  const auto leave = c10::make_scope_exit([this] { factors_ = {}; });
  step();
  untold_ = std::move(report);
}

void ShardedOptimizer::end_step() {
  std::vector<bool> updated(parameters_.pages->parameters().size());
  for (size_t index = 0; index < updated.size(); ++index) {
    updated[index] = groups_.contain(index) && parameters_.gradients->has(index);
  }
  ++made_;
  parameters_.writes->end_update(updated);
  parameters_.gradients->end_step();
  last_step_.synchronize();
  last_step_ = memory::Stream::current(parameters_.pages->world().communicator().device()).record();
}

void ShardedOptimizer::save(torch::serialize::OutputArchive&) const {
  ZP_THROW(
      "torch::save of a sharded optimizer: each rank holds a part of the state, and one archive "
      "would "
      "gather all of it; use zeropage::save_state(directory, model, optimizer)");
}

void ShardedOptimizer::load(torch::serialize::InputArchive&) {
  ZP_THROW(
      "torch::load into a sharded optimizer: its state is in no archive; use "
      "zeropage::load_state(directory, model, optimizer)");
}

}  // namespace zeropage
