// The micro-steps of an accumulator: backwards whose gradients add up to one step's, and the mean of
// their losses.
//
// Lifetime: shares the pages and the reducer. Dropping it drops the gradients of a step that is open.
// Threads: the training thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "accumulate/gradient_accumulation.h"
#include "accumulate/weightless_loss.h"
#include "optim/exact_sum.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/accumulator.h"

namespace zeropage::accumulate {

// What a micro-step counts for in the step.
struct MicroStepShare {
  at::Tensor loss;  // its value; undefined where other ranks compute it
  double weight = 1;
  double scale = 1;  // of the loss, also where other ranks compute it
  std::shared_ptr<const WeightlessLoss> weightless = nullptr;  // where weight is 0
};

// Null where the loss has a weight.
std::shared_ptr<const WeightlessLoss> weightless(const at::Tensor& loss, double weight);

// What the backward of the loss begins with. Throws where the loss is not one element that requires grad, or cannot carry
// its weight and scale exactly.
at::Tensor seed_of(const at::Tensor& loss, double weight, double scale);

// What the stages of a pipeline choose by their own pages: all of them do what one needs. Collective over them.
bool on_any_stage(const zero::ParameterPages& pages, bool needs_it);

// The mean loss of micro-batches, by weight.
class MeanLoss {
 public:
  void add(const at::Tensor& loss, double weight);
  at::Tensor value() const;  // fp64 []; undefined where none had weight

 private:
  at::Tensor sum_;  // fp64 []
  double weight_ = 0;
};

class MicroSteps {
 public:
  // options: with a loss scaler. Throws where they contradict each other or the model's.
  MicroSteps(const zero::ShardedModel& sharded, const AccumulatorOptions& options);

  // Accumulator::backward(); scale: of the loss. Collective.
  void backward(const at::Tensor& loss, double weight, double scale);
  // A backward that was begun elsewhere, or has no loss here (stage_backwards.h). Collective.
  void run(const MicroStepShare& share, const std::function<void()>& backward);
  // Throws where there are fewer than a step has, or warns.
  void check_complete() const;
  // Makes the gradients ready for the step, those of tied weights from both ends of a pipeline. Collective.
  void finish();
  // Drops the gradients; the next backward is a step's first.
  void end();

  // Number of micro-steps of a step.
  int64_t count() const { return count_; }
  void set_count(int64_t count);
  // Since the last step.
  int64_t made() const { return made_; }
  const MicroStepReduction& reduction() const { return reduction_; }
  // Whether the last one's backward makes the step, before all gradients are known.
  bool step_in_backward() const;

  // Weight and loss of this rank's micro-batches since the last step, or of that step.
  const optim::ExactSum& weight() const { return weight_; }
  at::Tensor loss() const { return loss_.value(); }
  // What makes the mean of the gradients, for the weight of all ranks' micro-batches: 1 where a script has looked at
  // them since the last backward, for which they were made the mean.
  double mean_factor(double weight, double scale) const;
  // What was not finite when a script looked first, if the loss scale is to be lowered for it: whatever the script has
  // made of it since, no step is made.
  struct Overflow {
    std::vector<std::string> not_finite;  // parameters, in the module's order
    double norm = 0;
  };
  const std::optional<Overflow>& overflow() const { return overflow_; }

 private:
  void make_mean(double scale);
  optim::ExactSum look_for_overflow();
  void begin();
  void begin_micro_step();
  zero::BackwardPlan plan(const MicroStepShare& share) const;

  // Constant after construction.
  const zero::ShardedModel sharded_;
  const comm::ReduceOp op_;
  const MicroStepReduction reduction_;
  const IncompleteStep incomplete_;
  const bool scale_changes_;

  int64_t count_;
  std::unique_ptr<GradientAccumulation> accumulation_;  // of the step that was begun last
  int64_t made_ = 0;
  bool is_mean_ = false;
  std::optional<Overflow> overflow_;
  optim::ExactSum weight_;
  MeanLoss loss_;
};

}  // namespace zeropage::accumulate
