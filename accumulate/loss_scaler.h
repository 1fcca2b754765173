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
#pragma once

#include <cstdint>

#include <torch/serialize/archive.h>

namespace zeropage::accumulate {

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

}  // namespace zeropage::accumulate
