// What the gradients of a backward are for. An accumulation (accumulate/gradient_accumulation.h) or no_sync()
// sets it; otherwise the defaults hold.
#pragma once

#include <cstdint>

#include "zeropage/communicator.h"

namespace zeropage::zero {

// What a bucket is opened for.
enum class Collect : uint8_t {
  kForReduction,  // one backward's gradients, about to be reduced
  kLocally,       // several backwards', added up on this rank (no_sync)
};

// Which part of an optimizer step the backward is.
enum class StepPart : uint8_t {
  kAll,            // no accumulation, or one by no_sync()
  kMicroStep,      // of an accumulation, and further ones follow
  kLastMicroStep,  // of an accumulation
  kNone,           // between an accumulation's micro-steps: no backward may run
  kOver,           // the accumulation's gradients are ready for the step, which has not ended
};

// Whether the step has further backwards after one.
enum class Backwards : uint8_t { kAllCame, kMoreFollow };

struct BackwardPlan {
  Collect collect = Collect::kForReduction;
  // What the reduction makes of the ranks' gradients: kMean or kSum.
  comm::ReduceOp op = comm::ReduceOp::kMean;
  StepPart part = StepPart::kAll;
  // It brings no gradients, whatever they are; its collectives take place.
  bool discards = false;
  // What an update that is made in the backward itself multiplies its gradients by.
  double factor = 1;

  bool accumulates() const { return part != StepPart::kAll; }
  Backwards backwards() const {
    return part == StepPart::kMicroStep ? Backwards::kMoreFollow : Backwards::kAllCame;
  }
};

}  // namespace zeropage::zero
