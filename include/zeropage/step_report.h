// What became of a step of an accumulator (zeropage/accumulator.h).
//
// Lifetime: both keep what they need, beyond the accumulator and the model. Values.
// Threads: the training thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zeropage::zero {
class LateReport;
}  // namespace zeropage::zero

namespace zeropage {

enum class Skipped : uint8_t {
  kNo,
  kNotFinite,  // an infinity or NaN in the gradients of some rank
  kNormSpike,
  kNoWeight,  // no micro-batch of any rank had weight
};

struct StepReport {
  Skipped skipped = Skipped::kNo;
  double norm = 0;          // of the mean gradient, before clipping
  double clipped_norm = 0;  // as the optimizer got it; with clip_value as before
  double weight = 0;        // of all micro-batches of all ranks
  double loss_scale = 1;    // of these gradients
  double next_loss_scale = 1;
  bool at_lowest_scale = false;  // an overflow should have lowered the scale, and could not
  std::vector<std::string> not_finite = {};  // parameters, in the module's order

  bool stepped() const { return skipped == Skipped::kNo; }
  // "stepped, norm 1.25 clipped to 1", or why not.
  std::string to_string() const;
};

// A step that was enqueued (Accumulator::enqueue_step).
class EnqueuedStep {
 public:
  explicit EnqueuedStep(std::shared_ptr<zero::LateReport> report);

  // Waits until the device knows the gradients of the step. Throws c10::Error where the device has failed.
  const StepReport& report() const;

 private:
  std::shared_ptr<zero::LateReport> report_;
};

}  // namespace zeropage
