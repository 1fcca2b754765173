// Runs a torch::optim class on what this rank owns of each page, then shares the result.
//
// It is a torch::optim::Optimizer whose parameters and options are the user's: schedulers,
// per-group options and add_param_group work on it as on any other. Inside, each page has an update
// of what this rank owns of it (zero/update/page_updates.h): by the class itself, or by the fused form of
// it; so state exists once over all ranks. While page k + 1 is stepped, page k's new values travel
// (zero/update/step_pipeline.h).
//
// On an accelerator step() enqueues, and returns at once; only the step before must have ended, so
// the host is never more than one ahead.
//
// Lifetime: shares the pages and the reducer with the DistributedDataParallel that made them; either may go
// first.
// Threads: the training thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "device/stream.h"
#include "zero/setup/sharded_parameters.h"
#include "zero/step_report.h"
#include "zero/update/page_update.h"
#include "zero/update/page_updates.h"
#include "zero/update/parameter_groups.h"
#include "zero/update/step_pipeline.h"
#include "zero/update/update_factory.h"

namespace zeropage {

class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  using Groups = ParameterGroups::Groups;

  ~ShardedOptimizer() override;

  // Collective. Averages gradients that backward has not averaged yet, updates what this rank owns,
  // and returns when all whole parameters are new on this rank; sharded ones come when they are
  // used. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Whether a device's flag can keep an update from being made: none is by the class, or offloaded.
  bool reads_found_inf() const { return updates_->read_found_inf(); }
  // step(), with gradients that are multiplied by the scale. Where found_inf, fp32 [1] on the device, is
  // not 0, the device leaves it out: values and states then stay, bit for bit, and so do the counts of
  // steps, once the report, which comes with found_inf, has been asked.
  void step_with(const offload::GradientFactors& factors,
                 std::shared_ptr<LateReport> report = nullptr);

  bool updates(const ParameterPages& pages) const { return parameters_.pages.get() == &pages; }

  // For zero/saving/sharded_state.h. Calls visit for what this rank owns of each parameter's state, page by
  // page, and end_page when it was called for all of a page; until then offloaded states have memory.
  // Throws where steps are one step late, and after a step that did not end.
  using VisitState = std::function<void(size_t page, OwnedState&)>;
  void visit_states(StateAccess access, const VisitState& visit,
                    const std::function<void(size_t page)>& end_page = nullptr);
  // The same for one page, whether or not it trains.
  void visit_states_of(size_t page, StateAccess access, const VisitState& visit,
                       const std::function<void(size_t page)>& end_page);
  const std::string& class_name() const { return factory_.algorithm().class_name; }
  // That it keeps of a parameter, of its size; 0 where that is not known before the first step.
  int64_t states_of_a_parameter() const { return factory_.algorithm().states; }
  // Steps made, those before a load included. Waits for the verdict on the last one.
  int64_t steps() {
    hear();
    return made_;
  }
  void set_steps(int64_t steps);
  // Indices of the parameters of each group, each once.
  std::vector<size_t> parameters_of_group(size_t group) const {
    return groups_.parameters_of(group);
  }

  // Sharded state is not one archive; both throw.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  using Algorithm = UpdateAlgorithm;

  // Collective: ranks must agree on groups and options.
  ShardedOptimizer(ShardedParameters parameters, const Groups& groups,
                   std::unique_ptr<torch::optim::OptimizerOptions> defaults, Algorithm algorithm);

 private:
  void check_class_takes_options() const;
  void check_memory_holds_states() const;
  void check_whole(const char* who) const;
  void begin_visit();
  void end_step();
  void hear();

  const ShardedParameters parameters_;
  const UpdateFactory factory_;
  ParameterGroups groups_;
  std::unique_ptr<PageUpdates> updates_;
  std::unique_ptr<StepPipeline> pipeline_;
  int64_t made_ = 0;                    // one more where untold_ says that it was not made
  offload::GradientFactors factors_;    // of the step that is made now
  std::shared_ptr<LateReport> untold_;  // of the last step; null: it was made
  memory::Event last_step_;             // its end
  std::string error_;                   // of a step that was begun and did not end
};

}  // namespace zeropage
