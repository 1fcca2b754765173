// The gradient of one page, from autograd to the step.
//
//   kCollecting --start()--> kReducing --close()--> kReduced, or kSummed in an accumulation
//   kReduced, kSummed --reopen()--> kReopened --start()--> kReducing
//   kReopened --end_without_reduction()--> kCollecting
//
// kGradientMoves has all moves.
//
// While it collects, the bucket has this rank's own gradient, and p.grad() of the parameters are slots in
// it. A reduced gradient that was not zeroed when the page is reopened is kept, and added to the next one: a mean
// is never averaged again. In kReopened p.grad() shows nothing of the kept sum. In kCollecting p.grad() also stands
// for the kept sum; zeroing or replacing it discards that sum. Other changes in place are refused, since they could
// not reach the sum.
//
// Between two backwards p.grad() owns the memory of the gradient, which is freed with it. The memory of a kept sum
// is owned here.
//
// Lifetime: the pages, the parameters and the buckets outlive it. Threads: the thread that runs backward.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/gradients/backward_plan.h"
#include "zero/gradients/bucket.h"
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/gradient_presence.h"
#include "zero/gradients/hooks.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

enum class GradientState : uint8_t {
  kCollecting,  // this rank's own gradients come into the bucket
  kReopened,    // the same, and what was reduced before is kept beside, to be added
  kReducing,    // the bucket travels
  kReduced,     // the mean is there
  kSummed,      // a part of a sum over micro-batches is there
};
inline constexpr size_t kGradientStateCount = 5;

// "collecting".
std::string_view name(GradientState state);

struct GradientMove {
  GradientState from;
  GradientState to;
  std::string_view by;  // the methods of PageGradient that make it
};

inline constexpr auto kGradientMoves = [] {
  using enum GradientState;
  return std::array<GradientMove, 11>{{
      {kCollecting, kReducing, "start"},
      {kReopened, kReducing, "start"},
      {kReducing, kReduced, "close"},
      {kReducing, kSummed, "close"},
      {kReduced, kReopened, "reopen"},
      {kSummed, kReopened, "reopen"},
      {kCollecting, kCollecting, "end_without_reduction, abandon, drop"},
      {kReopened, kCollecting, "end_without_reduction, abandon, drop"},
      {kReduced, kReduced, "drop"},
      {kSummed, kReduced, "drop"},
      // A backward that threw between start and close: what travelled is dropped.
      {kReducing, kCollecting, "drop"},
  }};
}();

// Every change of the state goes through move_to().
class GradientStateMachine {
 public:
  GradientState now() const { return now_; }
  // Throws c10::Error where kGradientMoves has no such move.
  void move_to(GradientState next);

 private:
  GradientState now_ = GradientState::kCollecting;
};

class PageGradient {
 public:
  PageGradient(size_t page, const TrainingParameters& training, GradientBuckets& buckets);

  GradientSlots& slots() { return slots_; }
  const GradientSlots& slots() const { return slots_; }
  bool is_collecting() const { return is(State::kCollecting) || is(State::kReopened); }
  bool is_reducing() const { return is(State::kReducing); }
  bool is_reduced() const { return is(State::kReduced) || is(State::kSummed); }

  // Called before a gradient of this backward is accumulated. Throws if the present gradient is part of a sum and
  // was zeroed. present: of the last reduction.
  void before_accumulate(size_t parameter, const GradientPresence& present);
  // Notes that it was accumulated. Returns whether it was the last.
  bool arrive() { return ++arrived_ >= slots_.all().size(); }
  bool is_complete() const { return arrived_ >= slots_.all().size(); }

  // REQUIRES: is_reduced().
  void reopen(const GradientPresence& present);
  // Whether it was reopened and has a kept sum.
  bool hides_kept() const;
  // The backward has ended, and reduced nothing. REQUIRES: open slots, if hides_kept().
  void end_without_reduction();
  // The backward has ended by an exception.
  void abandon();

  // Starts the reduction, with zeros for parameters without a gradient on this rank. REQUIRES:
  // is_collecting(), and all gradients are in their slots, which are open.
  void start(comm::ReduceOp op, GradientPresence& present);
  bool has_ended() const { return reduction_.done(); }
  void wait();
  // REQUIRES: wait().
  void close(const BackwardPlan& plan);
  // p.grad() becomes the reduced gradient where any rank has one, and keeps its memory.
  void hand_over(const GradientPresence& present);

  // Drops the gradient, the kept sum, and what a step that threw has left under way.
  void drop();

 private:
  using State = GradientState;
  using Slot = GradientSlots::Slot;

  bool is(State state) const { return state_.now() == state; }
  void forget(Slot& slot);
  void check_user_changes(Slot& slot);

  // Constant after construction.
  const size_t page_;
  const TrainingParameters& training_;
  GradientBuckets& buckets_;

  GradientSlots slots_;
  GradientStateMachine state_;
  size_t arrived_ = 0;  // gradients in this backward
  memory::Pending reduction_;
};

}  // namespace zeropage::zero
