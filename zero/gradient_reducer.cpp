#include "zero/gradient_reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "memory/check.h"
#include "memory/ledger.h"

namespace zeropage {
namespace {

using torch::autograd::variable_list;

constexpr int kNoBackward = -1;
// Enough that a change of all elements does not hide behind a few zeros.
constexpr int64_t kSampledElements = 16;

struct PreHook final : torch::autograd::FunctionPreHook {
  explicit PreHook(std::function<void()> call) : call(std::move(call)) {}
  variable_list operator()(const variable_list& gradients) override {
    call();
    return gradients;
  }
  std::function<void()> call;
};

struct PostHook final : torch::autograd::FunctionPostHook {
  explicit PostHook(std::function<void()> call) : call(std::move(call)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    call();
    return outputs;
  }
  std::function<void()> call;
};

}  // namespace

GradientReducer::GradientReducer(std::shared_ptr<ParameterPages> pages,
                                 std::unique_ptr<GradientReduction> reduction, ReduceWhen when)
    : pages_(std::move(pages)),
      reduction_(std::move(reduction)),
      when_(when),
      buckets_(pages_->layouts().size()),
      hooked_(pages_->parameters().size()) {
  for (size_t index = 0; index < hooked_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (placed.parameter.tensor.requires_grad()) buckets_[placed.page].parameters.push_back(index);
  }
  for (size_t page = buckets_.size(); page-- > 0;) {
    if (buckets_[page].parameters.empty()) continue;
    make_bucket(page);
    launch_order_.push_back(page);
  }
  used_ = at::zeros({static_cast<int64_t>(hooked_.size())}, at::kByte);
}

GradientReducer::~GradientReducer() {
  for (Hooked& hooked : hooked_) {
    if (!hooked.accumulator) continue;
    hooked.accumulator->del_post_hook(hooked.post_hook);
    auto& pre_hooks = hooked.accumulator->pre_hooks();
    std::erase_if(pre_hooks, [&](const auto& hook) { return hook.get() == hooked.pre_hook; });
  }
}

void GradientReducer::make_bucket(size_t page) {
  const PageLayout& layout = pages_->layouts()[page];
  Bucket& bucket = buckets_[page];
  {
    memory::KindScope kind(memory::Kind::kGradient);
    // Zeros: the gaps between slots are reduced too and must stay zero.
    bucket.flat = at::zeros({layout.padded_numel(pages_->world().size())}, layout.dtype);
  }
  for (const size_t index : bucket.parameters) {
    const PlacedParameter& placed = pages_->parameters()[index];
    const at::Tensor& tensor = placed.parameter.tensor;
    // Not a view: zero_grad() detaches p.grad() in place, which autograd refuses for views.
    hooked_[index].slot =
        at::empty({0}, layout.dtype)
            .set_(bucket.flat.storage(), placed.offset, tensor.sizes(), tensor.strides());
    if (tensor.grad().defined()) collect(index);
    hook(index);
  }
}

void GradientReducer::hook(size_t parameter) {
  Hooked& hooked = hooked_[parameter];
  hooked.accumulator =
      torch::autograd::impl::grad_accumulator(pages_->parameters()[parameter].parameter.tensor);
  TORCH_INTERNAL_ASSERT(hooked.accumulator, "a leaf that requires grad has an accumulator");
  auto pre_hook = std::make_unique<PreHook>([this, parameter] { before_accumulate(parameter); });
  hooked.pre_hook = pre_hook.get();
  hooked.accumulator->add_pre_hook(std::move(pre_hook));
  hooked.post_hook = hooked.accumulator->add_post_hook(
      std::make_unique<PostHook>([this, parameter] { after_accumulate(parameter); }));
}

GradientReducer::Bucket& GradientReducer::bucket_of(size_t parameter) {
  return buckets_[pages_->parameters()[parameter].page];
}

const std::string& GradientReducer::name_of(size_t parameter) const {
  return pages_->parameters()[parameter].parameter.name();
}

void GradientReducer::before_accumulate(size_t parameter) {
  enter_backward();
  Bucket& bucket = bucket_of(parameter);
  if (bucket.state == BucketState::kReduced) {
    reopen(bucket, pages_->parameters()[parameter].page);
  } else if (bucket.reopened_in != backward_) {
    forget_if_zeroed(parameter);
  }
}

void GradientReducer::after_accumulate(size_t parameter) {
  const torch::NoGradGuard no_grad;
  Bucket& bucket = bucket_of(parameter);
  TORCH_INTERNAL_ASSERT(bucket.state == BucketState::kCollecting, "parameter \"",
                        name_of(parameter), "\" got a gradient while its bucket was reduced");
  collect(parameter);
  if (when_ == ReduceWhen::kInStep || !synchronizes_) return;
  ++bucket.arrived;
  launch_complete();
}

void GradientReducer::enter_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == backward_) return;
  if (backward_ != kNoBackward) {
    ZP_CHECK(
        next_launch_ == 0,
        "an earlier backward ended by an exception, or this one runs inside another, after some "
        "gradients were exchanged: the ranks are out of step; restart from the last saved state");
    end_local_backward();
  }
  backward_ = task;
  if (when_ == ReduceWhen::kInBackward && synchronizes_) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { reduce_rest(); });
  } else {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { end_local_backward(); });
  }
}

void GradientReducer::collect(size_t parameter) {
  at::Tensor& gradient = pages_->parameters()[parameter].parameter.tensor.mutable_grad();
  Hooked& hooked = hooked_[parameter];
  if (!gradient.defined() || gradient.is_same(hooked.slot)) return;
  ZP_CHECK(
      gradient.layout() == at::kStrided, "the gradient of parameter \"", name_of(parameter),
      "\" is ", gradient.layout(),
      "; sparse gradients are not reduced, make the module produce dense ones (sparse(false))");
  const torch::NoGradGuard no_grad;
  hooked.slot.copy_(gradient);
  gradient = hooked.slot;
}

void GradientReducer::reopen(Bucket& bucket, size_t page) {
  const torch::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(bucket.state == BucketState::kReduced);
  const Range owned = pages_->owned(page);
  // Another tensor than the slot is a gradient that the user set since: this rank's own, to be
  // averaged.
  const auto is_kept = [this](size_t index) {
    const at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.grad();
    return gradient.defined() && gradient.is_same(hooked_[index].slot);
  };
  const bool any_kept = std::any_of(bucket.parameters.begin(), bucket.parameters.end(), is_kept);
  if (any_kept) {
    memory::KindScope kind(memory::Kind::kGradient);
    bucket.set_aside = bucket.flat.narrow(0, owned.begin, owned.numel()).clone();
  }
  for (const size_t index : bucket.parameters) {
    const PlacedParameter& placed = pages_->parameters()[index];
    hooked_[index].carried = is_kept(index);
    if (hooked_[index].carried) {
      placed.parameter.tensor.mutable_grad().reset();
      continue;
    }
    const Range zeroed = intersection(owned, placed.range);
    if (any_kept && !zeroed.empty()) {
      bucket.set_aside.narrow(0, zeroed.begin - owned.begin, zeroed.numel()).zero_();
    }
  }
  bucket.state = BucketState::kCollecting;
  bucket.reopened_in = backward_;
  reduced_in_cycle_ = false;
}

// A gradient that was set aside, and to which this backward added nothing, shows as a zero in
// p.grad(): so the user can zero it, and we can tell.
void GradientReducer::end_local_backward() {
  const torch::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    bucket.arrived = 0;
    if (!bucket.set_aside.defined()) continue;
    for (const size_t index : bucket.parameters) {
      at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.mutable_grad();
      if (!hooked_[index].carried || gradient.defined()) continue;
      hooked_[index].slot.zero_();
      gradient = hooked_[index].slot;
    }
  }
  backward_ = kNoBackward;
}

void GradientReducer::forget_if_zeroed(size_t parameter) {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  Hooked& hooked = hooked_[parameter];
  if (!hooked.carried || placed.parameter.tensor.grad().defined()) return;
  hooked.carried = false;
  const Range owned = pages_->owned(placed.page);
  const Range zeroed = intersection(owned, placed.range);
  if (zeroed.empty()) return;
  const torch::NoGradGuard no_grad;
  buckets_[placed.page].set_aside.narrow(0, zeroed.begin - owned.begin, zeroed.numel()).zero_();
}

void GradientReducer::launch_complete() {
  while (next_launch_ < launch_order_.size()) {
    const size_t page = launch_order_[next_launch_];
    if (buckets_[page].arrived < buckets_[page].parameters.size()) return;
    launch(page);
    ++next_launch_;
  }
}

void GradientReducer::launch(size_t page) {
  Bucket& bucket = buckets_[page];
  TORCH_INTERNAL_ASSERT(bucket.state == BucketState::kCollecting);
  auto* used = used_.mutable_data_ptr<uint8_t>();
  for (const size_t index : bucket.parameters) {
    if (bucket.reopened_in != backward_) forget_if_zeroed(index);
    const bool defined = pages_->parameters()[index].parameter.tensor.grad().defined();
    if (!defined) hooked_[index].slot.zero_();
    used[index] = defined || hooked_[index].carried;
  }
  bucket.state = BucketState::kReducing;
  bucket.reduction =
      reduction_->start(pages_->world().communicator(), bucket.flat,
                        "the gradient of page \"" + pages_->layouts()[page].name + "\"");
}

void GradientReducer::reduce_rest() {
  const torch::NoGradGuard no_grad;
  for (; next_launch_ < launch_order_.size(); ++next_launch_) {
    const size_t page = launch_order_[next_launch_];
    Bucket& bucket = buckets_[page];
    if (bucket.state == BucketState::kReduced) reopen(bucket, page);
    for (const size_t index : bucket.parameters) collect(index);
    launch(page);
  }
  const comm::Pending used = pages_->world().communicator().all_reduce(
      used_, comm::ReduceOp::kMax, "which parameters have a gradient");
  for (const size_t page : launch_order_) settle(buckets_[page], page);
  used.wait();
  const auto* used_anywhere = used_.const_data_ptr<uint8_t>();
  for (size_t index = 0; index < hooked_.size(); ++index) {
    Hooked& hooked = hooked_[index];
    if (!hooked.slot.defined()) continue;
    at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.mutable_grad();
    if (used_anywhere[index] != 0) {
      gradient = hooked.slot;
    } else {
      gradient.reset();
    }
    hooked.sample_when_reduced = sample_of(index);
    hooked.carried = false;
  }
  next_launch_ = 0;
  backward_ = kNoBackward;
  reduced_in_cycle_ = true;
}

void GradientReducer::settle(Bucket& bucket, size_t page) {
  bucket.reduction.wait();
  bucket.reduction = {};
  bucket.arrived = 0;
  bucket.state = BucketState::kReduced;
  if (bucket.set_aside.defined()) {
    const Range owned = pages_->owned(page);
    bucket.flat.narrow(0, owned.begin, owned.numel()).add_(bucket.set_aside);
    bucket.set_aside.reset();
  }
}

void GradientReducer::finish() {
  ZP_CHECK(
      backward_ == kNoBackward,
      "step() after a backward that ended by an exception: its gradients are incomplete; zero them "
      "and run backward again first");
  if (!reduced_in_cycle_) {
    reduce_rest();
  } else if (!reduction_->leaves_whole_gradient()) {
    check_not_modified();
  }
  for (size_t index = 0; index < hooked_.size(); ++index) {
    const at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.grad();
    if (!hooked_[index].slot.defined() || !gradient.defined() ||
        gradient.is_same(hooked_[index].slot))
      continue;
    ZP_CHECK(
        reduction_->leaves_whole_gradient(), "parameter \"", name_of(index),
        "\": p.grad() was replaced after backward, but this rank holds only its shard of the mean "
        "gradient; change gradients before backward ends (a tensor hook), or use stage 0");
    collect(index);
  }
}

// A few elements of the slot. Version counters would not do: clip_grad_norm_ changes gradients
// behind .data().
uint64_t GradientReducer::sample_of(size_t parameter) const {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  const auto element_bytes = static_cast<int64_t>(placed.parameter.tensor.element_size());
  const auto* bytes = static_cast<const char*>(bucket(placed.page).const_data_ptr());
  const int64_t stride = std::max<int64_t>(1, placed.range.numel() / kSampledElements);
  uint64_t hash = 0;
  for (int64_t at = placed.range.begin; at < placed.range.end; at += stride) {
    uint64_t bits = 0;
    std::memcpy(&bits, bytes + at * element_bytes, static_cast<size_t>(element_bytes));
    hash = (hash ^ bits) * 0x9E3779B97F4A7C15ULL;
  }
  return hash;
}

void GradientReducer::check_not_modified() const {
  for (size_t index = 0; index < hooked_.size(); ++index) {
    const Hooked& hooked = hooked_[index];
    if (!hooked.slot.defined() || !has_gradient(index)) continue;
    ZP_CHECK(
        sample_of(index) == hooked.sample_when_reduced, "parameter \"", name_of(index),
        "\": p.grad() was changed between backward and step (clip_grad_norm_?), but at this stage "
        "it "
        "is the mean gradient only in this rank's shard, so every rank would scale differently; "
        "use stage 0 to change gradients by hand");
  }
}

bool GradientReducer::has_gradient(size_t parameter) const {
  return hooked_[parameter].slot.defined() &&
         pages_->parameters()[parameter].parameter.tensor.grad().defined();
}

}  // namespace zeropage
