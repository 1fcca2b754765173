// The pages' gradients in the one order in which all ranks reduce them: the last page of the module first.
//
// Lifetime: what it is given outlives it. Threads: the thread that runs backward.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "zero/agreement/rank_agreement.h"
#include "zero/gradients/backward_plan.h"
#include "zero/gradients/gradient_collector.h"
#include "zero/gradients/gradient_presence.h"
#include "zero/gradients/page_gradient.h"

namespace zeropage::zero {

// Called in the middle of a backward for a page that is reduced, where no backward of the step follows: its gradient and the
// factor are what the step will see, and no call may change them. has_gradient: of the page's parameters.
using OnReduced = std::function<void(size_t page, const HasGradient& has_gradient, double factor)>;

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
  // Whether the last reduction had a gradient of the parameter, from any rank.
  bool has(size_t parameter) const { return present_.has(parameter); }
  // Whether reductions of this backward have been started.
  bool have_begun() const { return next_ > 0; }
  // Ends a backward: reduces all pages that were not, and makes p.grad() the reduced gradients. Returns whether the
  // ranks' hashes agree. Collective.
  // tell: writes what goes along; may be empty.
  AgreementResult finish(const AgreementHashes& own_hashes,
                         const std::function<void(uint8_t* bytes)>& tell);
  // What goes along with the message at the end: as many bytes, of which all ranks have the largest then.
  void make_room_beside(size_t count) { present_.make_room_beside(count); }
  const uint8_t* beside() const { return present_.beside(); }
  // Ends a backward that reduces nothing.
  void end_without_reduction();
  // A backward has ended by an exception. REQUIRES: not have_begun().
  void abandon();

  // Frees what was gathered of gradients that the user has read, and has zeroed since.
  void release_zeroed();
  // Drops all gradients, and what is kept of earlier ones. Throws where one is in use, and drops none.
  void drop();

 private:
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
  std::deque<size_t> reducing_;          // pages, the first that was started first
  GradientCollector collector_;
  BackwardPlan plan_;
  OnReduced on_reduced_;
  size_t next_ = 0;         // to be reduced, into training_.pages()
  AgreementHashes hashes_;  // in this backward
};

}  // namespace zeropage::zero
