// The order in which a step's updates are made and their values travel: offloaded pages are begun first,
// or were in backward, then each page is updated, and its new values are gathered while the next one is.
//
// Where updates read whole tensors, pages go in buckets: the first pass of all of a bucket's, then the same with the second one,
// while the buckets behind it have their first (zero/update/tensor_passes.h).
//
// With StepWhen::kInBackward and kOneStepLate it follows gradients into the middle of a backward.
//
// Lifetime: that of the optimizer, whose updates and groups it uses; takes back what it left with the
// reducer. Threads: the training thread, and the one that runs backward.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "optim/fused_step.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/page_updates.h"
#include "zero/update/parameter_groups.h"
#include "zero/update/tensor_passes.h"

namespace zeropage::zero {

class StepPipeline {
 public:
  // Throws where another optimizer of the model follows backward already, and what TensorPasses throws.
  StepPipeline(ShardedModel parameters, const ParameterGroups& groups, PageUpdates& updates,
               const UpdateAlgorithm& algorithm);
  ~StepPipeline();
  StepPipeline(const StepPipeline&) = delete;
  StepPipeline& operator=(const StepPipeline&) = delete;

  // Takes in groups and pages that are new.
  void adopt() {
    if (tensors_) tensors_->adopt();
  }

  // What it holds at most beyond what persists; 0 where updates have one pass.
  int64_t transient_bytes() const { return tensors_ ? tensors_->transient_bytes() : 0; }

  // Updates what this rank owns, with gradients that are multiplied by the scale, and returns when all
  // whole parameters are new on this rank; sharded ones come when they are used. Collective.
  void run(const HasGradient& has_gradient, const optim::GradientFactors& factors) const;

 private:
  using OfPage = PageUpdates::OfPage;

  void follow_backward();
  void start_in_backward(size_t page, const HasGradient& has_gradient, double factor);
  // Called on the thread of the steps, with the gradient there.
  using BeforeUpdate = std::function<void(const at::Tensor& gradient)>;
  BeforeUpdate in_backward_before_update(size_t page) const;
  OffloadedSteps::Gradient gradient_of(size_t page) const;
  void start_offloaded(const OfPage& of_page, const HasGradient& has_gradient, double factor,
                       const Directions& directions = {},
                       BeforeUpdate before_update = nullptr) const;
  void update_on_device(const OfPage& of_page, const HasGradient& has_gradient,
                        const optim::GradientFactors& factors,
                        const Directions& directions = {}) const;
  // Both leave in in_flight what has still to be gathered.
  void run_at_once(const HasGradient& has_gradient, const optim::GradientFactors& factors,
                   std::vector<comm::Pending>& in_flight) const;
  void run_in_buckets(const HasGradient& has_gradient, const optim::GradientFactors& factors,
                      std::vector<comm::Pending>& in_flight) const;

  const ShardedModel parameters_;
  const ParameterGroups& groups_;
  PageUpdates& updates_;
  const std::unique_ptr<TensorPasses> tensors_;  // null where all updates have one pass
  bool follows_ = false;                         // backward
};

}  // namespace zeropage::zero
