// `Accumulator`: micro-batches to a step, loss scaling, spikes of the norm.
#pragma once

#include <concepts>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "zeropage/detail/model_ref.h"
#include "zeropage/step_report.h"

// The factor by which a loss is multiplied so that fp16 gradients do not round to zero
// (Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740, section 3.2). Gradients
// are divided by it before they are used; a step whose gradients overflowed is skipped.
//
//   (loss * scaler.scale()).backward();
//   const auto verdict = scaler.update(found_inf);  // on any rank
//   if (!verdict.skipped) optimizer.step();         // by gradients / verdict.scale_before
//
// Dynamic: growth_interval good steps in a row multiply the scale by growth_factor, an overflow
// multiplies it by backoff_factor. Scales and factors are powers of two, so that scaling and
// unscaling change no mantissa.
// Threads: one at a time. Ranks that see the same verdicts on infinities have the same scale.
// Cost: a few numbers.

namespace zeropage::accumulate {

class StageBackwards;

// What an overflow does where the scale cannot go lower.
enum class AtMinimum {
  kContinue,  // the step is skipped and the scale stays
  kStop,      // update() throws
};

// Scales lie in [2^-126, 2^126]: fp32 holds them and their inverses.
struct LossScalerOptions {
  // A power of two, from min_scale to max_scale.
  double initial_scale = 65536;
  // Powers of two: growth_factor is at least 1, backoff_factor at most 1.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  // Good steps in a row before the scale grows; at least 1.
  int64_t growth_interval = 2000;
  // Overflows before the scale backs off, counted from the last growth, whether or not in a row; at
  // least 1. The hysteresis-th overflow and all after it back off; a growth forgets them. As
  // Megatron-LM's, and DeepSpeed's without consecutive_hysteresis.
  int64_t hysteresis = 1;
  // Powers of two.
  double min_scale = 1;
  double max_scale = 16777216;
  AtMinimum at_minimum = AtMinimum::kContinue;

  // A scale that never changes; 1 is no scaling. With kStop the first overflow throws.
  static LossScalerOptions fixed(double scale);
};

// Whether there are overflows that change the scale.
bool changes(const LossScalerOptions& options);
// Throws c10::Error unless the options are in range.
void check_options(const LossScalerOptions& options);

class LossScaler {
 public:
  struct Verdict {
    bool skipped = false;
    double scale_before = 0;  // of this step's gradients
    double scale_after = 0;   // of the next step's loss
    // An overflow should have lowered the scale, and could not.
    bool at_minimum = false;
  };

  explicit LossScaler(const LossScalerOptions& options = {});

  // The scale of the next loss.
  double scale() const { return state_.scale; }
  const LossScalerOptions& options() const { return options_; }
  // Good steps since the last overflow or growth.
  int64_t good_steps() const { return state_.good_steps; }
  // Over all steps, and since the last good one.
  int64_t skipped_steps() const { return state_.skipped_steps; }
  int64_t skipped_in_a_row() const { return state_.skipped_in_a_row; }

  // Called once a step, when all its gradients are there. found_inf: whether any of them, on any rank, is not
  // finite. Throws c10::Error where it should back off at the minimum under AtMinimum::kStop, and
  // then leaves the scaler as it was.
  Verdict update(bool found_inf);

  // The state, without the options: torch::save(scaler, path), torch::load(scaler, path). A state
  // that is damaged or outside the options' scales is refused, and the scaler stays as it was.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct State {
    double scale = 0;
    int64_t good_steps = 0;
    int64_t overflows = 0;  // since the last growth
    int64_t skipped_steps = 0;
    int64_t skipped_in_a_row = 0;
  };

  Verdict count_overflow();
  Verdict count_good_step();

  LossScalerOptions options_;
  State state_;
};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const LossScaler& scaler);
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           LossScaler& scaler);

// Notices gradient norms that stick out: how many standard deviations a norm lies above the mean of
// the last accepted ones.
//
//   if (!spikes.look(norm).skips()) optimizer.step();
//
// Only norms above the mean count; z = (norm - mean) / deviation over the window's norms, with the sample standard
// deviation. Spikes and norms that are not finite do not enter the window. More than most_in_a_row
// spikes in a row are no spikes but a new level: the norm is accepted, and the window starts anew
// with it. Where all norms in the window are 0 there is nothing to compare with, and none is a
// spike.
// Threads: one at a time. Ranks that see the same norms come to the same verdicts, bit for bit,
// also after save and load. Cost: 8 bytes a norm in the window, and two passes over it a step.
enum class OnSpike {
  kSkip,  // the verdict says so
  kStop,  // look() throws
};

struct NormSpikeOptions {
  // Accepted norms that are remembered; at least 2.
  int64_t window = 128;
  // Standard deviations above the mean past which a norm is a spike; above 0.
  double z_score = 6;
  // Norms in the window before it judges; from 2 to window.
  int64_t warm_up = 32;
  // The deviation counts as at least this share of the mean, so that in a window of nearly equal
  // norms not every change is a spike: no norm below mean * (1 + z_score * least_deviation) is one.
  // Above 0.
  double least_deviation = 0.05;
  OnSpike on_spike = OnSpike::kSkip;
  // Spikes in a row that are skipped before they count as a new level; at least 1. Without meaning
  // under kStop.
  int64_t most_in_a_row = 8;
};

// Throws c10::Error unless the options are in range.
void check_options(const NormSpikeOptions& options);

class NormSpikes {
 public:
  struct Verdict {
    enum Kind {
      kAccepted,
      kNewLevel,  // accepted too: one spike more than most_in_a_row
      kSpike,
      kNotFinite,
    };

    Kind kind = kAccepted;
    // Mean and deviation of the window before this norm; 0 if the norm was not judged.
    double mean = 0;
    double deviation = 0;
    double z_score = 0;

    bool skips() const { return kind == kSpike || kind == kNotFinite; }
  };

  explicit NormSpikes(const NormSpikeOptions& options = {});

  // Called once a step, with the norm over all ranks, before it is clipped. Throws c10::Error on a
  // negative norm and, under OnSpike::kStop, on a spike; then it leaves the window as it was.
  Verdict look(double norm);

  const NormSpikeOptions& options() const { return options_; }
  // Over all steps, and since the last accepted norm.
  int64_t spikes() const { return spikes_; }
  int64_t spikes_in_a_row() const { return spikes_in_a_row_; }

  // The window and counters, without the options: torch::save(spikes, path), torch::load(spikes,
  // path). A state that is damaged or longer than the window is refused, and nothing changes.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  Verdict judge(double norm) const;
  void accept(double norm);

  NormSpikeOptions options_;
  std::deque<double> norms_;  // oldest first
  int64_t spikes_ = 0;
  int64_t spikes_in_a_row_ = 0;
};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const NormSpikes& spikes);
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           NormSpikes& spikes);

}  // namespace zeropage::accumulate

namespace zeropage {

// When the gradients of micro-steps are reduced over ranks. G: bytes of all gradients.
enum class ReduceMicroSteps : uint8_t {
  // kOnce where whole gradients take no memory that is not taken anyway: at stages 0 and 1, and on a rank that shares
  // the model with no other and keeps its gradients on the device. At stages 2 and 3 kOnce if whole gradients in
  // accumulate_dtype fit gradient_budget_bytes; otherwise, and without a budget, kEach. With Options::world_invariant
  // kEach. All stages of a pipeline do kEach if one of them would. Accumulator::reduction() says which it is, and why.
  //
  // The two add up in different orders, so their results differ in the last bits. For the same bits at all stages name
  // one of them.
  kAuto,
  // The gradients of each micro-step are reduced into what this rank owns: k reductions of G.
  // Memory as without accumulation; at stages 0 and 1 what a rank owns once more.
  kEach,
  // Whole gradients add up on each rank: one reduction of G, and at stages 2 and 3 G bytes. At
  // stages 0 and 1, where they are whole anyway, it costs nothing.
  kOnce,
};

// What ReduceMicroSteps comes to on a model.
struct MicroStepReduction {
  ReduceMicroSteps when = ReduceMicroSteps::kEach;  // kEach or kOnce
  // Why, as the end of a sentence: "each rank has whole gradients at this stage".
  std::string why = {};

  // "once a step: each rank has whole gradients at this stage".
  std::string to_string() const;
};

// What step() does before the last micro-step.
enum class IncompleteStep : uint8_t {
  kRefuse,
  kWarn,  // and makes the step of the micro-batches so far: the same number on all ranks
};

struct AccumulatorOptions {
  // Micro-batches of a step on each rank; the same on all ranks.
  int64_t micro_steps = 1;
  ReduceMicroSteps reduce = ReduceMicroSteps::kAuto;
  // Most bytes of whole gradients that kAuto lets a rank keep over micro-steps at stages 2 and 3; 0: none.
  int64_t gradient_budget_bytes = 0;
  IncompleteStep incomplete = IncompleteStep::kRefuse;

  // The largest norm of the mean gradient, over all parameters. Above 0.
  std::optional<double> clip_norm = {};
  // The largest element of the mean gradient, by magnitude. Above 0; not with clip_norm. Costs a
  // pass over the gradients.
  std::optional<double> clip_value = {};

  // Unset: for fp16 a dynamic scale with its defaults, otherwise none.
  std::optional<accumulate::LossScalerOptions> loss_scaler = {};
  // Unset: norms are not judged.
  std::optional<accumulate::NormSpikeOptions> norm_spikes = {};
};

// Makes one optimizer step of several micro-batches, from the mean of their gradients, in any
// precision.
//
//   zeropage::Accumulator accumulator(model, {.micro_steps = 8, .clip_norm = 1.0});
//   for (auto& batch : *loader) {
//     for (auto micro : zeropage::accumulate::micro_batches(batch, 8)) {
//       accumulator.backward(criterion(model(micro.data), micro.target));
//     }
//     accumulator.step(optimizer);  // and zeroes the gradients
//   }
//
// Backwards add up sums over ranks and micro-steps. One factor makes the mean of them, undoes the scale of the
// loss, and clips. The optimizer multiplies by it in its own pass: 1 / (weight of
// all micro-batches of all ranks x loss scale) x clip factor. Only gradients that travel in fp16
// are divided by the number of ranks in the reduction, before they are rounded.
//
// In a step all ranks agree first: on the weight, the norm (zeropage/gradient_norm.h) and whether
// gradients are finite. A step that is skipped leaves weights and optimizer state as they were, bit
// for bit.
//
// On an accelerator the update waits for the host where gradients decide something: with clip_norm,
// clip_value, norm_spikes, a loss scale that changes or stops, an optimizer by its class or offloaded.
// Otherwise the device itself skips an update with gradients that are not finite. step() then enqueues the update
// and waits for its report only, and enqueue_step() does not wait at all.
//
// Before the last backward() of a step p.grad() is a sum so far: over this rank's micro-batches alone where they are
// reduced once, over those of all ranks where each is reduced (reduction()). It may be read and multiplied, alike on all
// ranks; do not zero or replace it, since the next backward() would throw. After it a script that reads p.grad() sees the
// mean over micro-batches and ranks, without the scale of the loss, and may change it: the first operator that does
// more than multiply or zero, gradient_norm(), and clip_grad_norm_() make all of p.grad() the mean. That is
// collective, at stage 0 too. It throws where gradients are kept in half and scaled.
// With a loss scale that changes, that first read also finds out whether all gradients are finite, at the cost of
// reading them. If one is not, step() makes no step and lowers the scale, whatever the script has made of it since,
// and clip_grad_norm_() returns the norm.
// optimizer.step() is refused.
// Lifetime: shares the pages and the reducer with the model; either may go first. Destroying it drops the gradients
// of an accumulation that has begun.
// Collective: construction, backward(), step(). Threads: the training thread.
class Accumulator {
 public:
  // Throws where options contradict each other or the model's, or ranks differ.
  explicit Accumulator(const ModelRef& model, const AccumulatorOptions& options = {});
  ~Accumulator();

  // Computes the gradients of one micro-batch of this rank. loss: one element, the mean over the micro-batch, in
  // fp32; a loss in bf16 or half that would round weight x loss scale is refused. Do not divide it by micro_steps
  // or ranks, because step() does: gradients would be too small by that factor, and no check can notice.
  // weight: the weight of the micro-batch in the mean, such as its number of tokens; at least 0. So micro-batches
  // and ranks may differ in it, and the step takes the mean over all tokens. With weight 0 the loss and its gradients
  // count for nothing, also where they are NaN, as the mean over no tokens is. What other ranks' losses give this rank's
  // parameters by its experts, its attention over ranks or batch norm counts; so the outputs must be finite there.
  void backward(const torch::Tensor& loss, double weight = 1);

  // Other forms of backward(), for stages of a pipeline (accumulate/stage_backwards.h).
  accumulate::StageBackwards stage_backwards();

  // Steps these zeropage::Optimizers of the model with the mean gradient, or skips the step; then zeroes all
  // gradients. An error of the device in the step before may be thrown here.
  template <std::derived_from<torch::optim::Optimizer>... More>
  StepReport step(torch::optim::Optimizer& optimizer, More&... more) {
    return enqueue_step({&optimizer, &more...}).report();
  }
  // The same, but this call does not wait for the device: the report does, when it is read. If the report of a step
  // is read after the next one is enqueued, the host is always ahead of an accelerator. It is the report of this
  // step, whenever it is read.
  template <std::derived_from<torch::optim::Optimizer>... More>
  EnqueuedStep enqueue_step(torch::optim::Optimizer& optimizer, More&... more) {
    return enqueue_step({&optimizer, &more...});
  }

  // Drops what was accumulated since the last step, on all ranks alike. Use it after a backward() that threw before
  // gradients were exchanged: until then backward() and step() throw, since a part of that micro-batch may be in the sum.
  void abandon();

  // For the next steps, such as a last one of an epoch; between steps only.
  void set_micro_steps(int64_t micro_steps);
  int64_t micro_steps() const;
  // Backwards since the last step.
  int64_t micro_step() const;

  // This rank's mean loss of the micro-batches since the last step, or of that step; fp64 [],
  // on the loss's device. Undefined before the first, and where none had weight.
  torch::Tensor loss() const;

  // Whether each micro-step is reduced or all of them once, and why: what AccumulatorOptions::reduce comes to.
  const MicroStepReduction& reduction() const;
  // The scaler, to be saved and loaded with the training state. Waits for the verdict on the last step.
  accumulate::LossScaler& loss_scaler();
  // Null: norms are not judged.
  accumulate::NormSpikes* norm_spikes();

 private:
  struct Parts;

  EnqueuedStep enqueue_step(const std::vector<torch::optim::Optimizer*>& given);

  const std::unique_ptr<Parts> parts_;
};

}  // namespace zeropage
