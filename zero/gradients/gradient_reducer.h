// Collects gradients into their pages' buckets while backward runs and reduces each bucket over the
// ranks.
//
// The life of a bucket, checked at every transition:
//
//   kCollecting --(its last gradient, or the end of backward)--> kReducing
//   kReducing   --(the end of backward, or a bucket after it)--> kReduced
//   kReduced    --(first gradient of a later backward)---------> kCollecting
//
// * A hook behind AccumulateGrad moves p.grad() into the bucket and lets p.grad() be the bucket's slot
//   from then on; so there is one copy of the gradients, and what accumulates (no_sync) accumulates
//   in place. On an accelerator gradients wait with autograd for others of their page, up to half a
//   page of them, and are copied by one call.
// * A complete bucket is reduced at once, beside the rest of backward, in the same order on all ranks.
//   Where buckets are transient (zero/gradients/gradient_buckets), one is closed before the next is opened;
//   on the host too, up to half a page of gradients waits with autograd for that.
// * At the end of backward the rest is reduced, with zeros for parameters without a gradient on this
//   rank. A parameter without a gradient on any rank keeps p.grad() undefined, and the optimizer
//   leaves it alone.
// * A reduced gradient that was not zeroed is set aside when the next backward reaches its page, and
//   added to the next mean: what was averaged is never averaged again.
// * An accumulation (zero/accumulator.h) takes over what the backwards of one step mean: they are
//   summed, and multiplied by one factor in the step.
//
// p.grad() decides what exists: zero_grad() of a module, of an optimizer or by hand all do what they
// say.
//
// Threads: the thread that runs backward; one backward at a time, not nested.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "memory/ledger.h"
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/waiting_gradients.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage {

namespace detail {
class AccumulateHooks;
}

using HasGradient = std::function<bool(size_t parameter)>;

// When gradients are averaged over ranks.
enum class ReduceWhen : uint8_t {
  kInBackward,  // for a wrapped module
  kInStep,  // for an optimizer alone, which cannot know which backward is the last before step()
};

class GradientReducer {
 public:
  GradientReducer(std::shared_ptr<ParameterPages> pages, std::unique_ptr<GradientBuckets> buckets,
                  ReduceWhen when);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // False: backward only accumulates on this rank (no_sync).
  bool synchronizes() const { return synchronizes_; }
  void set_synchronizes(bool synchronizes) { synchronizes_ = synchronizes; }

  // After parameters were given other values by set_data().
  void restore_hooks() const;

  // Parameters that require a gradient and did not when begin_training() was called last.
  std::vector<size_t> unfrozen() const;
  // From here on they have gradients, and optimizers update them. The same on all ranks; between two
  // steps.
  void begin_training(const std::vector<size_t>& parameters);
  // Throws if there are unfrozen() ones.
  void check_all_train() const;

  // Called at the end of each backward that reduced gradients. Collectives in it are in the order of
  // the backward's.
  void set_after_reduction(std::function<void()> call) { after_reduction_ = std::move(call); }

  // Whether a backward has reduced gradients yet.
  bool has_reduced() const { return has_reduced_; }
  // Whether an optimizer of ours steps them.
  bool has_optimizer() const { return has_optimizer_; }
  void note_optimizer() { has_optimizer_ = true; }

  // Makes the gradients ready for a step: reduces them if no backward since the last step did.
  // Collective.
  void finish();
  // After a step: the next finish() is about new gradients.
  void begin_cycle() { reduced_in_cycle_ = false; }

  // From here on gradients are what reductions with `op` give, and no step may be made before the
  // accumulation is ready for it. Throws if there are gradients already.
  void begin_accumulation(comm::ReduceOp op);
  struct MicroStepOptions {
    Collect collect = Collect::kForReduction;
    bool more_follow = false;  // of the same step
    bool discards = false;     // brings no gradients, whatever they are; its collectives take place
  };
  // While it lives, the one backward of an accumulation's micro-step may run.
  class MicroStep {
   public:
    MicroStep(GradientReducer& reducer, const MicroStepOptions& options);
    ~MicroStep();
    MicroStep(const MicroStep&) = delete;
    MicroStep& operator=(const MicroStep&) = delete;

   private:
    GradientReducer& reducer_;
    const bool synchronized_;
  };
  // finish(), of which the factor is then known that makes the mean of the gradients. Collective.
  void finish_accumulation();
  void set_factor(double factor) { factor_ = factor; }
  // Drops all gradients; backwards are averaged again.
  void end_accumulation();
  // What the step multiplies gradients by.
  double factor() const { return factor_; }

  // What is to be done with a page as soon as its gradient is reduced and no backward of the step
  // follows: then gradients and the factor are what the step will see, and no call may change them.
  // has_gradient: of the page's parameters.
  using OnReduced = std::function<void(size_t page, const HasGradient& has_gradient)>;
  void set_on_reduced(OnReduced on_reduced) { on_reduced_ = std::move(on_reduced); }
  // Called before a page's owned gradient is overwritten in backward.
  void set_before_close(std::function<void(size_t page)> before_close) {
    before_close_ = std::move(before_close);
  }

  // Whether one of them is set: there is room for one optimizer's.
  bool is_followed() const { return on_reduced_ || before_close_; }

  // Calls change(owned_gradient(page)) for every page that trains. REQUIRES: finish().
  void change_owned(const std::function<void(const at::Tensor& owned)>& change);

  // Whether the parameter has a gradient, on any rank, that finish() made ready and nobody has
  // zeroed since.
  bool has_gradient(size_t parameter) const;
  // Makes p.grad() of those of the parameters that have one whole for as long as `pins` lives.
  // REQUIRES: the last backward averaged. Collective.
  void gather(const std::vector<size_t>& parameters, memory::Pins& pins);
  // The gradient of what this rank owns of a page that trains. [owned numel]
  const at::Tensor& owned_gradient(size_t page) const { return buckets_->owned(page); }
  // Whether it is on the host, by itself.
  bool has_offloaded_gradient(size_t page) const { return buckets_->is_offloaded(page); }
  // It has all of it when this has ended.
  memory::Pending arrival(size_t page) const { return buckets_->arrival(page); }

 private:
  enum class BucketState : uint8_t { kCollecting, kReducing, kReduced };
  // kOpen: between its micro-steps. kFinished: until the step has ended.
  enum class Accumulation : uint8_t { kNone, kOpen, kInMicroStep, kFinished };

  struct PageState {
    std::vector<size_t> parameters;  // of the page, those that train
    BucketState bucket = BucketState::kCollecting;
    size_t arrived = 0;  // gradients in this backward
    comm::Pending reduction;
    at::Tensor used;  // [parameters], uint8: as used_, where the step does not wait for all pages
    comm::Pending used_anywhere;
    int reopened_in = -1;      // the backward that kept the mean, -1 for a step
    bool kept = false;         // a mean of earlier backwards is to be added to the next
    bool accumulates = false;  // a backward of the accumulation reduced it
  };

  struct Hooked {
    at::Tensor slot;  // the parameter's place in the bucket; undefined while that is closed
    std::unique_ptr<detail::AccumulateHooks> hooks;  // null: does not train
    bool carried = false;                            // has a gradient that was kept
  };

  void hook_what_trains();
  void hook(size_t parameter);
  bool trains(size_t parameter) const { return hooked_[parameter].hooks != nullptr; }
  at::Tensor& gradient_of(size_t parameter) const;
  PageState& page_of(size_t parameter);
  const std::string& name_of(size_t parameter) const;

  // Called by the hooks.
  std::vector<at::Tensor> before_accumulate(size_t parameter,
                                            const std::vector<at::Tensor>& gradients);
  void after_accumulate(size_t parameter);
  void enter_backward();

  bool may_wait(size_t page) const;
  bool would_block(size_t page) const;
  bool is_open(size_t page) const;
  void prepare();
  void open(size_t page);
  void place_slots(size_t page);
  void collect_waiting(size_t page);
  void collect(size_t page, std::vector<size_t> parameters);
  bool is_in_slot(size_t parameter) const;
  void reopen(size_t page);
  void end_local_backward();
  void forget_unfinished_backward();
  void forget_if_zeroed(size_t parameter);
  void launch_complete();
  void launch(size_t page);
  void reduce_rest();
  void finish_reduction(size_t page);
  void start_agreeing_on_used(size_t page);
  void step_in_backward(size_t page);
  void hand_over();
  std::vector<size_t> with_gradient() const;

  // Constant after construction.
  const std::shared_ptr<ParameterPages> pages_;
  const std::unique_ptr<GradientBuckets> buckets_;
  const ReduceWhen when_;
  const std::shared_ptr<memory::Ledger> ledger_;  // of the rank

  // Owned by the thread that runs backward.
  std::vector<size_t> launch_order_;  // pages that train, the last of the module first
  std::vector<PageState> states_;     // by page
  std::vector<Hooked> hooked_;        // by parameter
  WaitingGradients waiting_;
  at::Tensor used_;         // [parameters], uint8: has a gradient, here and then on any rank
  size_t next_launch_ = 0;  // into launch_order_
  int backward_ = -1;       // autograd's id of the backward in progress, -1 for none
  bool synchronizes_ = true;
  bool reduced_in_cycle_ = false;
  Accumulation accumulation_ = Accumulation::kNone;
  bool discards_ = false;
  double factor_ = 1;
  OnReduced on_reduced_;
  std::function<void(size_t page)> before_close_;
  std::function<void()> after_reduction_;
  bool has_optimizer_ = false;
  bool has_reduced_ = false;
};

}  // namespace zeropage
