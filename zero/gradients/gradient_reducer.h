// Reduces gradients over the ranks while backward runs, page by page.
//
// * A hook behind AccumulateGrad moves p.grad() into the page's bucket and lets p.grad() be its slot
//   there; so there is one copy of the gradients, and what accumulates (no_sync) accumulates in place.
// * A complete bucket is reduced at once, beside the rest of backward, in the same order on all ranks.
// * At the end of backward the rest is reduced, with zeros for parameters without a gradient on this
//   rank. A parameter without a gradient on any rank keeps p.grad() undefined, and the optimizer
//   leaves it alone.
// * A BackwardPlan says what a backward's gradients are for.
//
// p.grad() decides what exists: zero_grad() of a module, of an optimizer or by hand all do what they
// say. zero/gradients/page_gradient.h has the life of one page's gradient, zero/gradients/step_gradients.h
// what a step sees of them.
//
// Threads: the thread that runs backward; one backward at a time, not nested.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/agreement/rank_agreement.h"
#include "zero/gradients/backward_plan.h"
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/page_reductions.h"
#include "zero/gradients/training_parameters.h"
#include "zero/pages/make_pages.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

// Bytes that ranks tell each other at the end of a backward that reduces: each rank gets the largest of each.
struct BesideGradients {
  size_t count = 0;
  // Writes this rank's, when all its gradients are there.
  std::function<void(uint8_t* bytes)> tell;
  // Collectives in it are in the order of the backward's.
  std::function<void(const uint8_t* largest)> hear;
};

class GradientReducer {
 public:
  GradientReducer(const PageParts& parts, std::unique_ptr<GradientBuckets> buckets,
                  std::shared_ptr<RankAgreement> agreement, Unfrozen unfrozen);
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // The plan of the next backward. It is changed between two backwards.
  const BackwardPlan& plan() const { return reductions_.plan(); }
  void set_plan(const BackwardPlan& plan) { reductions_.set_plan(plan); }

  // Between the first and as many calls of the second, backwards outside an accumulation add up on this rank. Between
  // two backwards.
  void begin_no_sync();
  void end_no_sync();

  const comm::World& world() const { return pages_->world(); }
  const TrainingParameters& training() const { return training_; }
  // From here on parameters that were unfrozen have gradients, and optimizers update them. Collective where there are
  // any, and throws on all ranks unless they are the same on all; between two steps.
  void adopt_unfrozen();

  // At most one call; empty: none.
  const OnReduced& on_reduced() const { return reductions_.on_reduced(); }
  void set_on_reduced(OnReduced call) { reductions_.set_on_reduced(std::move(call)); }
  // What goes along with the last message of each backward that reduces gradients. Set once, on all ranks alike.
  void set_beside_gradients(BesideGradients beside);

  // Whether every gradient since the last step is reduced.
  bool is_reduced() const { return backward_ == kNoBackward && reduced_in_cycle_; }
  // Reduces the gradients that no backward has reduced since the last step. Collective. Throws after a
  // backward that ended by an exception.
  void reduce();
  // Whether the last reduction had a gradient of the parameter, from any rank.
  bool has_averaged(size_t parameter) const { return reductions_.has(parameter); }
  // The next reduce() is about new gradients: after a step, or of what came after the last reduction, whose mean stays.
  void begin_cycle() { reduced_in_cycle_ = false; }
  // Before a forward: gradients that were zeroed take no memory, also if somebody has read them.
  void release_zeroed() { reductions_.release_zeroed(); }
  // Drops all gradients, and what is kept of earlier ones. Throws where one is in use, and drops none.
  void drop();

  GradientBuckets& buckets() const { return *buckets_; }
  // Whether micro-steps are summed as one tree over them and the ranks.
  bool adds_as_tree() const { return pages_->options().world_invariant; }

 private:
  static constexpr int kNoBackward = -1;

  // Called by the hooks.
  std::vector<at::Tensor> before_accumulate(size_t parameter,
                                            const std::vector<at::Tensor>& gradients);
  void after_accumulate(size_t parameter);

  bool reduces_in_backward() const { return plan().collect == Collect::kForReduction; }
  void adopt_training();
  void set_collect(Collect collect);
  void enter_backward();
  void end_reducing_backward();
  void leave_backward();

  // Constant after construction.
  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const WholePages> paging_;
  const std::shared_ptr<PageWrites> writes_;
  const std::unique_ptr<GradientBuckets> buckets_;
  const std::shared_ptr<RankAgreement> agreement_;
  const std::shared_ptr<memory::Ledger> ledger_;  // of the rank

  // Owned by the thread that runs backward.
  TrainingParameters training_;
  PageReductions reductions_;
  int backward_ = kNoBackward;  // autograd's id of the backward in progress
  bool reduced_in_cycle_ = false;
  int no_syncs_ = 0;
  BesideGradients beside_;
};

// Before a step, of parameters that were unfrozen: throws where the wrapper has not been told of them; those of an optimizer
// alone begin to train.
void settle_unfrozen(GradientReducer& reducer);

// Writes to gathered gradients, and what waits to be added, are in the reduced ones then. Throws where one is in use.
void take_over_writes(GradientReducer& reducer);

}  // namespace zeropage::zero
