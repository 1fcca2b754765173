#include "zero/gradients/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/_foreach_copy.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "device/named_range.h"
#include "memory/check.h"
#include "zero/gradients/accumulate_hooks.h"

namespace zeropage {
namespace {

constexpr int kNoBackward = -1;

}  // namespace

GradientReducer::PageState& GradientReducer::page_of(size_t parameter) {
  return states_[pages_->parameters()[parameter].page];
}

at::Tensor& GradientReducer::gradient_of(size_t parameter) const {
  return pages_->parameters()[parameter].parameter.tensor.mutable_grad();
}

const std::string& GradientReducer::name_of(size_t parameter) const {
  return pages_->parameters()[parameter].parameter.name();
}

// Of an accelerator, backward runs on a thread of autograd's, which charges no rank.
std::vector<at::Tensor> GradientReducer::before_accumulate(
    size_t parameter, const std::vector<at::Tensor>& gradients) {
  const memory::LedgerScope ledger(ledger_);
  enter_backward();
  const PageState& state = page_of(parameter);
  if (state.bucket == BucketState::kReduced) {
    reopen(pages_->parameters()[parameter].page);
  } else if (state.reopened_in != backward_) {
    forget_if_zeroed(parameter);
  }
  if (!discards_) return gradients;
  return std::vector<at::Tensor>(gradients.size());
}

void GradientReducer::after_accumulate(size_t parameter) {
  const memory::LedgerScope ledger(ledger_);
  const torch::NoGradGuard no_grad;
  const size_t page = pages_->parameters()[parameter].page;
  PageState& state = states_[page];
  TORCH_INTERNAL_ASSERT(state.bucket == BucketState::kCollecting, "parameter \"",
                        name_of(parameter), "\" got a gradient while its bucket was reduced");
  const at::Tensor& gradient = gradient_of(parameter);
  if (gradient.defined() && !is_in_slot(parameter)) waiting_.add(page, parameter, gradient.numel());
  const bool is_complete = ++state.arrived >= state.parameters.size();
  if (is_complete || !may_wait(page)) collect_waiting(page);
  if (when_ == ReduceWhen::kInBackward && synchronizes_) launch_complete();
}

// On an accelerator a launch costs more than most of the copies, so one call copies what has waited.
// On the host each gradient is copied while it is in the cache, unless its bucket cannot be opened
// yet. It is half a page over all pages: a model of which every page misses a gradient holds no more.
bool GradientReducer::may_wait(size_t page) const {
  const bool has_launches = memory::has_streams(pages_->world().communicator().device().type());
  if (!has_launches && !would_block(page)) return false;
  return 2 * waiting_.numel() <= pages_->layouts()[page].numel;
}

// Opening a transient bucket waits for the one before it.
bool GradientReducer::would_block(size_t page) const {
  if (!buckets_->are_transient() || is_open(page)) return false;
  return std::any_of(launch_order_.begin(), launch_order_.end(), [&](size_t other) {
    const PageState& state = states_[other];
    return state.bucket == BucketState::kReducing && !state.reduction.done();
  });
}

bool GradientReducer::is_open(size_t page) const {
  return hooked_[states_[page].parameters.front()].slot.defined();
}

// Of other pages too, if their buckets have memory: what waits longer would leave less room.
void GradientReducer::collect_waiting(size_t page) {
  collect(page, waiting_.of(page));
  for (const size_t other : launch_order_) {
    if (waiting_.numel() == 0) return;
    if (is_open(other)) collect(other, waiting_.of(other));
  }
}

void GradientReducer::enter_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == backward_) return;
  if (backward_ != kNoBackward) {
    ZP_CHECK(
        next_launch_ == 0,
        "an earlier backward ended by an exception, or this one runs inside another, after some "
        "gradients were exchanged: the ranks are out of step; restart from the last saved state");
    forget_unfinished_backward();
  }
  ZP_CHECK(
      accumulation_ == Accumulation::kNone || accumulation_ == Accumulation::kInMicroStep,
      "backward() past the accumulator in the middle of a step, whose gradients it would change: "
      "call accumulator.backward(loss), or accumulator.abandon() first");
  backward_ = task;
  const bool reduces = when_ == ReduceWhen::kInBackward && synchronizes_;
  torch::autograd::Engine::get_default_engine().queue_callback([this, reduces] {
    const memory::LedgerScope ledger(ledger_);  // on autograd's thread too
    reduces ? reduce_rest() : end_local_backward();
  });
}

// Gives the page's parameters their slots. Where buckets are transient, there is one at a time: the
// reduction of the page before has had all of this page's backward so far to end in.
void GradientReducer::open(size_t page) {
  if (is_open(page)) return;
  if (buckets_->are_transient()) {
    for (const size_t other : launch_order_) {
      if (states_[other].bucket == BucketState::kReducing) finish_reduction(other);
    }
  }
  place_slots(page);
}

void GradientReducer::place_slots(size_t page) {
  const at::Tensor& bucket =
      buckets_->open(page, synchronizes_ ? Collect::kForReduction : Collect::kLocally);
  for (const size_t index : states_[page].parameters) {
    hooked_[index].slot = slot_in(bucket, pages_->parameters()[index]);
  }
}

bool GradientReducer::is_in_slot(size_t parameter) const {
  const at::Tensor& slot = hooked_[parameter].slot;
  return slot.defined() && same_elements(gradient_of(parameter), slot);
}

// Moves what these parameters of the page have into their slots. A call a page: its slots are of one
// dtype, which LibTorch's kernel for lists takes for granted.
void GradientReducer::collect(size_t page, std::vector<size_t> parameters) {
  const torch::NoGradGuard no_grad;
  waiting_.forget(page);
  std::erase_if(parameters, [this](size_t index) {
    return !gradient_of(index).defined() || is_in_slot(index);
  });
  if (parameters.empty()) return;
  std::vector<at::Tensor> gradients, slots;
  for (const size_t index : parameters) {
    const at::Tensor& gradient = gradients.emplace_back(gradient_of(index));
    ZP_CHECK(
        gradient.layout() == at::kStrided, "the gradient of parameter \"", name_of(index), "\" is ",
        gradient.layout(),
        "; sparse gradients are not reduced, make the module produce dense ones (sparse(false))");
  }
  open(page);
  for (const size_t index : parameters) slots.push_back(hooked_[index].slot);
  at::_foreach_copy_(slots, gradients);
  for (const size_t index : parameters) gradient_of(index) = hooked_[index].slot;
}

void GradientReducer::reopen(size_t page) {
  const torch::NoGradGuard no_grad;
  PageState& state = states_[page];
  TORCH_INTERNAL_ASSERT(state.bucket == BucketState::kReduced);
  std::vector<Range> forgotten;
  state.kept = false;
  for (const size_t index : state.parameters) {
    // Another tensor than the reduced gradient is one that the user set since: this rank's own, to
    // be averaged.
    at::Tensor& gradient = gradient_of(index);
    hooked_[index].carried =
        gradient.defined() && same_elements(gradient, buckets_->reduced_gradient(index));
    if (hooked_[index].carried) {
      state.kept = true;
      gradient.reset();
    } else {
      ZP_CHECK(
          !state.accumulates || used_.const_data_ptr<uint8_t>()[index] == 0, "parameter \"",
          name_of(index),
          "\": its gradient was zeroed or replaced between two micro-batches of a step, whose "
          "sum it is part of; the accumulator zeroes gradients in step(), leave zero_grad() out");
      forgotten.push_back(pages_->parameters()[index].range);
    }
  }
  if (state.kept) {
    buckets_->keep(page, forgotten);
  } else if (state.accumulates) {
    buckets_->skip(page);
  } else {
    buckets_->forget(page);
  }
  state.bucket = BucketState::kCollecting;
  state.reopened_in = backward_;
  reduced_in_cycle_ = false;
}

// A gradient that was kept, and to which this backward added nothing, shows as a zero in p.grad():
// so the user can zero it, and we can tell.
void GradientReducer::end_local_backward() {
  const torch::NoGradGuard no_grad;
  for (const size_t page : launch_order_) {
    PageState& state = states_[page];
    state.arrived = 0;
    collect(page, waiting_.of(page));
    if (!state.kept || state.bucket != BucketState::kCollecting) continue;
    open(page);
    for (const size_t index : state.parameters) {
      at::Tensor& gradient = gradient_of(index);
      if (!hooked_[index].carried || gradient.defined()) continue;
      hooked_[index].slot.zero_();
      gradient = hooked_[index].slot;
    }
  }
  pages_->end_backward();
  backward_ = kNoBackward;
}

// What it set aside to be kept is gone with what it collected: its gradients have been zeroed since.
void GradientReducer::forget_unfinished_backward() {
  for (const size_t page : launch_order_) {
    states_[page].arrived = 0;
    waiting_.forget(page);
    if (states_[page].bucket != BucketState::kCollecting) continue;
    for (const size_t index : states_[page].parameters) forget_if_zeroed(index);
  }
  pages_->end_backward();
  backward_ = kNoBackward;
}

void GradientReducer::forget_if_zeroed(size_t parameter) {
  Hooked& hooked = hooked_[parameter];
  if (!hooked.carried || gradient_of(parameter).defined()) return;
  hooked.carried = false;
  const torch::NoGradGuard no_grad;
  const PlacedParameter& placed = pages_->parameters()[parameter];
  buckets_->forget(placed.page, placed.range);
}

void GradientReducer::launch_complete() {
  while (next_launch_ < launch_order_.size()) {
    const size_t page = launch_order_[next_launch_];
    if (states_[page].arrived < states_[page].parameters.size()) return;
    launch(page);
    ++next_launch_;
  }
}

void GradientReducer::launch(size_t page) {
  const memory::NamedRange range("GradientReducer::launch");
  PageState& state = states_[page];
  TORCH_INTERNAL_ASSERT(state.bucket == BucketState::kCollecting);
  collect(page, state.parameters);
  open(page);
  auto* used = used_.mutable_data_ptr<uint8_t>();
  for (const size_t index : state.parameters) {
    if (state.reopened_in != backward_) forget_if_zeroed(index);
    const bool defined = gradient_of(index).defined();
    if (!defined) hooked_[index].slot.zero_();
    used[index] = defined || hooked_[index].carried;
  }
  state.bucket = BucketState::kReducing;
  state.reduction = buckets_->start_reduction(page);
  if (on_reduced_) start_agreeing_on_used(page);
  if (!buckets_->are_transient()) return;
  for (const size_t index : state.parameters) {
    hooked_[index].slot.reset();
    gradient_of(index).reset();
  }
}

// One page behind: the reductions of whole gradients are else looked at when backward ends.
void GradientReducer::start_agreeing_on_used(size_t page) {
  PageState& state = states_[page];
  const auto count = static_cast<int64_t>(state.parameters.size());
  state.used = at::empty({count}, at::kByte);
  for (int64_t i = 0; i < count; ++i) {
    state.used.mutable_data_ptr<uint8_t>()[i] =
        used_.const_data_ptr<uint8_t>()[state.parameters[static_cast<size_t>(i)]];
  }
  state.used_anywhere = pages_->world().communicator().all_reduce(
      state.used, comm::ReduceOp::kMax, "which parameters of a page have a gradient");
  for (const size_t other : launch_order_) {
    if (other != page && states_[other].bucket == BucketState::kReducing) finish_reduction(other);
  }
}

void GradientReducer::step_in_backward(size_t page) {
  PageState& state = states_[page];
  state.used_anywhere.wait();
  if (buckets_->more_follow()) return;
  on_reduced_(page, [&state](size_t parameter) {
    const auto at = std::find(state.parameters.begin(), state.parameters.end(), parameter);
    TORCH_INTERNAL_ASSERT(at != state.parameters.end());
    return state.used.const_data_ptr<uint8_t>()[at - state.parameters.begin()] != 0;
  });
}

void GradientReducer::reduce_rest() {
  const torch::NoGradGuard no_grad;
  for (; next_launch_ < launch_order_.size(); ++next_launch_) {
    const size_t page = launch_order_[next_launch_];
    if (states_[page].bucket == BucketState::kReduced) reopen(page);
    launch(page);
  }
  const comm::Pending used = pages_->world().communicator().all_reduce(
      used_, comm::ReduceOp::kMax, "which parameters have a gradient");
  for (const size_t page : launch_order_) {
    if (states_[page].bucket == BucketState::kReducing) finish_reduction(page);
  }
  used.wait();
  hand_over();
  pages_->end_backward();
  next_launch_ = 0;
  backward_ = kNoBackward;
  reduced_in_cycle_ = has_reduced_ = true;
}

void GradientReducer::finish_reduction(size_t page) {
  const memory::NamedRange range("GradientReducer::finish_reduction");
  PageState& state = states_[page];
  state.reduction.wait();
  state.reduction = {};
  state.arrived = 0;
  state.kept = false;
  state.accumulates = accumulation_ != Accumulation::kNone;
  state.bucket = BucketState::kReduced;
  if (before_close_) before_close_(page);
  buckets_->close(page);
  if (on_reduced_) step_in_backward(page);
}

// p.grad() becomes the reduced gradient where there is one on any rank.
void GradientReducer::hand_over() {
  const auto* used_anywhere = used_.const_data_ptr<uint8_t>();
  for (size_t index = 0; index < hooked_.size(); ++index) {
    if (!trains(index)) continue;
    hooked_[index].carried = false;
    gradient_of(index) =
        used_anywhere[index] != 0 ? buckets_->reduced_gradient(index) : at::Tensor();
  }
  buckets_->note_reduced();
  if (after_reduction_) after_reduction_();
}

std::vector<size_t> GradientReducer::with_gradient() const {
  std::vector<size_t> parameters;
  for (size_t index = 0; index < hooked_.size(); ++index) {
    if (has_gradient(index)) parameters.push_back(index);
  }
  return parameters;
}

void GradientReducer::finish() {
  ZP_CHECK(
      accumulation_ != Accumulation::kOpen,
      "step() in the middle of an accumulation, whose gradients are sums so far: run the other "
      "micro-batches and call accumulator.step(optimizer), or accumulator.abandon()");
  // The first of several optimizers has begun a cycle, and may have multiplied its gradients.
  if (accumulation_ == Accumulation::kFinished) return;
  prepare();
}

void GradientReducer::prepare() {
  ZP_CHECK(
      backward_ == kNoBackward,
      "step() after a backward that ended by an exception: its gradients are incomplete; zero them "
      "and run backward again first");
  if (!reduced_in_cycle_) reduce_rest();
  const torch::NoGradGuard no_grad;
  for (const size_t index : with_gradient()) {
    at::Tensor& gradient = gradient_of(index);
    const at::Tensor& reduced = buckets_->reduced_gradient(index);
    const bool replaced = !same_elements(gradient, reduced);
    ZP_CHECK(!replaced || !on_reduced_, "parameter \"", name_of(index),
             "\": p.grad() was replaced after backward, which has made the step with it already "
             "(options.offload.step); use StepWhen::kInStep to change gradients");
    if (replaced) buckets_->replace(index, gradient);
    gradient = reduced;
  }
  buckets_->take_over_changes();
  bool changed = false;
  for (const size_t page : launch_order_) changed |= buckets_->complete(page);
  if (changed) buckets_->note_reduced();
}

void GradientReducer::gather(const std::vector<size_t>& parameters, memory::Pins& pins) {
  ZP_CHECK(reduced_in_cycle_ && backward_ == kNoBackward,
           "GatheredGradients: expected gradients that a backward has averaged, but the last one "
           "was under no_sync(), or there was none since step(); p.grad() is this rank's own then");
  std::vector<size_t> reduced;
  for (const size_t index : parameters) {
    if (has_gradient(index)) reduced.push_back(index);
  }
  if (!reduced.empty()) buckets_->gather(reduced, pins);
}

void GradientReducer::begin_accumulation(comm::ReduceOp op) {
  ZP_CHECK(accumulation_ == Accumulation::kNone,
           "accumulator.backward(): another accumulator of this model is in the middle of a step; "
           "step() or abandon() it first");
  const std::vector<size_t> left = with_gradient();
  ZP_CHECK(
      left.empty(), "parameter \"", left.empty() ? "" : name_of(left.front()),
      "\" has a gradient before the first micro-batch of an accumulation, from a backward() of "
      "your own; call zero_grad() first, and backward() through the accumulator");
  buckets_->set_op(op);
  accumulation_ = Accumulation::kOpen;
}

GradientReducer::MicroStep::MicroStep(GradientReducer& reducer, const MicroStepOptions& options)
    : reducer_(reducer), synchronized_(reducer.synchronizes_) {
  TORCH_INTERNAL_ASSERT(reducer_.accumulation_ == Accumulation::kOpen);
  reducer_.accumulation_ = Accumulation::kInMicroStep;
  reducer_.synchronizes_ = options.collect == Collect::kForReduction;
  reducer_.discards_ = options.discards;
  reducer_.buckets_->set_more_follow(options.more_follow);
}

GradientReducer::MicroStep::~MicroStep() {
  reducer_.accumulation_ = Accumulation::kOpen;
  reducer_.synchronizes_ = synchronized_;
  reducer_.discards_ = false;
  reducer_.buckets_->set_more_follow(false);
}

void GradientReducer::finish_accumulation() {
  TORCH_INTERNAL_ASSERT(accumulation_ == Accumulation::kOpen);
  prepare();
  accumulation_ = Accumulation::kFinished;
}

void GradientReducer::end_accumulation() {
  for (size_t index = 0; index < hooked_.size(); ++index) {
    if (trains(index)) gradient_of(index).reset();
    hooked_[index].carried = false;
  }
  for (const size_t page : launch_order_) {
    states_[page].accumulates = false;
    // Of a backward that ended by an exception.
    if (std::exchange(states_[page].kept, false)) buckets_->forget(page);
  }
  buckets_->set_op(comm::ReduceOp::kMean);
  accumulation_ = Accumulation::kNone;
  factor_ = 1;
  begin_cycle();
}

void GradientReducer::change_owned(const std::function<void(const at::Tensor& owned)>& change) {
  ZP_CHECK(!on_reduced_,
           "gradients are to be clipped or changed after backward, which has made the "
           "step with them already (options.offload.step); use StepWhen::kInStep");
  const torch::NoGradGuard no_grad;
  for (const size_t page : launch_order_) change(buckets_->owned(page));
  buckets_->note_reduced();
}

bool GradientReducer::has_gradient(size_t parameter) const {
  return trains(parameter) && gradient_of(parameter).defined();
}

}  // namespace zeropage
