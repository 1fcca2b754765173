// The updates that a ShardedOptimizer makes: each page has one, of what this rank owns of it
// (zero/update/page_updates.h), by the class itself or by the fused form of it; so state exists once
// over all ranks. While page k + 1 is stepped, page k's new values travel
// (zero/update/step_pipeline.h).
//
// Lifetime: owned by the optimizer, whose groups it reads. Threads: the training thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "device/stream.h"
#include "zero/late_report.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/optimizer_agreement.h"
#include "zero/update/page_update.h"
#include "zero/update/page_updates.h"
#include "zero/update/parameter_groups.h"
#include "zero/update/state_witness.h"
#include "zero/update/step_pipeline.h"
#include "zero/update/update_factory.h"

namespace zeropage {
class ShardedOptimizer;
}  // namespace zeropage

namespace zeropage::zero {

class ShardedUpdates {
 public:
  // Collective: ranks must agree on groups and options.
  ShardedUpdates(ShardedModel parameters, torch::optim::Optimizer& optimizer,
                 UpdateAlgorithm algorithm);
  ~ShardedUpdates();
  ShardedUpdates(const ShardedUpdates&) = delete;
  ShardedUpdates& operator=(const ShardedUpdates&) = delete;

  // ShardedOptimizer::step(), without a closure.
  void step();

  // Whether a device's flag can keep an update from being made: none is by the class, or offloaded.
  bool reads_found_inf() const { return updates_->read_found_inf(); }
  // step(), with gradients that are multiplied by the scale. Where found_inf, fp32 [1] on the device, is
  // not 0, the device leaves it out: values and states then stay, bit for bit, and so do the counts of
  // steps, once the report, which comes with found_inf, has been asked.
  void step_with(const optim::GradientFactors& factors,
                 std::shared_ptr<LateReport> report = nullptr);

  const ShardedModel& parameters() const { return parameters_; }
  bool updates(const ParameterPages& pages) const { return parameters_.pages.get() == &pages; }

  // For zeropage/saving.h. Calls visit for what this rank owns of each parameter's state, page by
  // page, and end_page when it was called for all of a page; until then offloaded states have memory.
  // Throws where steps are one step late, and after a step that did not end. States of pages that do not train are not written to.
  using VisitState = std::function<void(size_t page, OwnedState&)>;
  void visit_states(StateAccess access, const VisitState& visit,
                    const std::function<void(size_t page)>& end_page = nullptr);
  // The same for one page, whether or not it trains.
  void visit_states_of(size_t page, StateAccess access, const VisitState& visit,
                       const std::function<void(size_t page)>& end_page);
  // Whether the page has an update, and so states: it trains, or did since the optimizer was made.
  bool updates_page(size_t page) const { return updates_->find(page) != nullptr; }
  // Those of pages that have no update, from a load. They take the place of earlier ones.
  void keep_frozen_states(std::map<size_t, std::vector<OwnedState>> by_page);
  const std::string& class_name() const { return factory_.algorithm().class_name; }
  // Elements of states for each element that this rank updates, in the mean; 0 if that is not known before the first step.
  double states_of_a_parameter() const;
  // Steps made, those before a load included. Waits for the verdict on the last one.
  int64_t steps() {
    resolve_verdict();
    return made_;
  }
  void set_steps(int64_t steps);
  // Indices of the parameters of each group, each once.
  std::vector<size_t> parameters_of_group(size_t group) const {
    return groups_.parameters_of(group);
  }

 private:
  void check_class_takes_options(const torch::optim::Optimizer& optimizer) const;
  void check_memory_holds_states() const;
  void check_memory_holds_step() const;
  void note_facts() const;
  void check_whole(const char* who) const;
  void begin_visit();
  void end_step();
  void resolve_verdict();

  const ShardedModel parameters_;
  const UpdateFactory factory_;
  StateWitness witness_;
  ParameterGroups groups_;
  OptimizerAgreement agreement_;
  std::unique_ptr<PageUpdates> updates_;
  std::unique_ptr<StepPipeline> pipeline_;
  int64_t made_ = 0;                // one more where pending_report_ says that it was not made
  optim::GradientFactors factors_;  // of the step that is made now
  std::shared_ptr<LateReport> pending_report_;  // of the last step; null: it was made
  device::Event last_step_;                     // its end
  std::string error_;                           // of a step that was begun and did not end
};

}  // namespace zeropage::zero

namespace zeropage {

zero::ShardedUpdates& updates_of(ShardedOptimizer& optimizer);
const zero::ShardedUpdates& updates_of(const ShardedOptimizer& optimizer);

}  // namespace zeropage
