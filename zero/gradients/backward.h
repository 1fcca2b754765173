// A backward: gradients are collected in their pages' buckets and reduced over the ranks while it runs, page by page.
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
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/agreement/rank_agreement.h"
#include "zero/gradients/backward_plan.h"
#include "zero/gradients/bucket.h"
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/gradient_presence.h"
#include "zero/gradients/hooks.h"
#include "zero/gradients/page_gradient.h"
#include "zero/pages/make_pages.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

// Called in the middle of a backward for a page that is reduced, where no backward of the step follows: its gradient and the
// factor are what the step will see, and no call may change them. has_gradient: of the page's parameters.
using OnReduced = std::function<void(size_t page, const HasGradient& has_gradient, double factor)>;

// The pages' gradients in the one order in which all ranks reduce them: the last page of the module first.
//
// On an accelerator a launch costs more than most of the copies into buckets: gradients wait with autograd for others of
// their page, up to half a page of them over all pages, and one call copies what has waited. On the host each is copied
// while it is in the cache, unless its bucket cannot be opened yet: of transient buckets one is closed before the next is
// opened.
//
// Lifetime: what it is given outlives it.
class PageReductions {
 public:
  PageReductions(std::shared_ptr<ParameterPages> pages, const TrainingParameters& training,
                 GradientBuckets& buckets, std::shared_ptr<RankAgreement> agreement);
  PageReductions(const PageReductions&) = delete;
  PageReductions& operator=(const PageReductions&) = delete;

  const BackwardPlan& plan() const { return plan_; }
  void set_plan(const BackwardPlan& plan) { plan_ = plan; }
  const OnReduced& on_reduced() const { return on_reduced_; }
  void set_on_reduced(OnReduced call) { on_reduced_ = std::move(call); }

  // Parameters of the page have begun to train.
  void begin_training(size_t page);

  // Around the accumulation of a parameter's gradient. before_accumulate(): whether its page was reduced.
  bool before_accumulate(size_t parameter);
  void after_accumulate(size_t parameter);

  // Starts the reductions of pages that are complete, as far as it is their turn.
  void start_complete();
  // At the end of a backward: starts those of all pages that have none yet.
  void start_rest();
  // Whether reductions of this backward have been started.
  bool have_begun() const { return next_ > 0; }
  // Ends a backward that has started all: makes p.grad() the reduced gradients. Returns whether the ranks' hashes agree.
  // Collective.
  AgreementResult finish(const AgreementHashes& own_hashes);
  // Ends a backward that reduces nothing.
  void end_without_reduction();
  // A backward has ended by an exception. REQUIRES: not have_begun().
  void abandon();

  // Whether the last reduction had a gradient of the parameter, from any rank.
  bool has(size_t parameter) const { return present_.has(parameter); }
  // What goes along with the message of finish(): as many bytes, of which all ranks have the largest then.
  void make_room_beside(size_t count) { present_.make_room_beside(count); }
  uint8_t* beside() { return present_.beside(); }

  // Frees what was gathered of gradients that the user has read, and has zeroed since.
  void release_zeroed();
  // Drops all gradients, and what is kept of earlier ones. Throws where one is in use, and drops none.
  void drop();

 private:
  // From autograd into the page's bucket. collect_page(): all of the page that is not there yet.
  void collect_page(size_t page) { collect(page, training_.of_page(page)); }
  void collect_waiting(size_t page) { collect(page, waiting_.of(page)); }
  void collect(size_t page, std::vector<size_t> parameters);
  bool may_wait(size_t page) const;
  bool would_block(size_t page) const;
  // Gives the page's bucket memory.
  void open(size_t page);

  void start(size_t page);
  // Ends the page whose reduction was started first; or all, in that order.
  void end_first();
  void end_all();

  // Constant after construction.
  const std::shared_ptr<ParameterPages> pages_;
  const TrainingParameters& training_;
  GradientBuckets& buckets_;
  const std::shared_ptr<RankAgreement> agreement_;

  GradientPresence present_;
  std::vector<PageGradient> gradients_;  // by page
  WaitingGradients waiting_;
  std::deque<size_t> reducing_;  // pages, the first that was started first
  BackwardPlan plan_;
  OnReduced on_reduced_;
  size_t next_ = 0;         // to be reduced, into training_.pages()
  AgreementHashes hashes_;  // in this backward
};

// Bytes that ranks tell each other at the end of a backward that reduces: each rank gets the largest of each.
struct BesideGradients {
  size_t count = 0;
  // Writes this rank's, when all its gradients are there.
  std::function<void(uint8_t* bytes)> tell;
  // Collectives in it are in the order of the backward's.
  std::function<void(const uint8_t* largest)> hear;
};

// Where a backward begins and ends, and whether the gradients of a step are reduced.
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
  // What there is of a step that has not ended, in words; "" between zero_grad() and the next backward.
  std::string what_is_pending() const;

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
  RankAgreement::Averages averages() const;
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
