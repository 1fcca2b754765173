#include "zero/gradients/whole_buckets.h"

#include <utility>

#include "operators/tensor_mark.h"
#include "paging/trap.h"
#include "parallel/slice_gradient.h"
#include "parallel/slice_mark.h"
#include "zero/gradients/bucket.h"
#include "zero/gradients/expert_mean.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
namespace {

// Lets operators on a gradient run.
class UseMark final : public operators::TensorMark {
 public:
  UseMark() : operators::TensorMark("p.grad() in an accumulation", On::kBuffer) {}

  bool replaces(const c10::OperatorHandle& /*handle*/) const override { return false; }
  bool run(const c10::OperatorHandle& /*handle*/, const at::Tensor& /*marked*/,
           torch::jit::Stack& /*stack*/) override {
    return false;
  }
};

}  // namespace

WholeBuckets::WholeBuckets(std::shared_ptr<ParameterPages> pages, const Options& options)
    : pages_(std::move(pages)),
      pages_of_gradients_(pages_->layouts().size(),
                          {{}, {}, MicroStepSums(sum_order_of(options)), {}}) {}

void WholeBuckets::begin_training(size_t page, const std::vector<size_t>& parameters) {
  pages_of_gradients_[page].gaps = gaps_between(*pages_, page, parameters);
}

at::Tensor WholeBuckets::make_bucket(size_t page) const {
  const PageLayout& layout = pages_->layouts()[page];
  const comm::World& shards = pages_->shards(page);
  const memory::KindScope kind(memory::Kind::kGradient);
  const memory::OwnerScope owner("gradient", layout.name);
  return shards.communicator().buffer(layout.padded_numel(shards.size()),
                                      pages_->plan()[page].gradient_dtype);
}

at::Tensor WholeBuckets::open(size_t page, Collect /*collect*/) {
  const at::Tensor made = make_bucket(page);
  zero_gaps(made, pages_of_gradients_[page].gaps);
  bucket(page).set(made);
  return made;
}

void WholeBuckets::renew(size_t page) {
  bucket(page).set(make_bucket(page).zero_());
}

at::Tensor WholeBuckets::owned(size_t page) const {
  const at::Tensor bucket = pages_of_gradients_[page].bucket.get();
  if (!bucket.defined()) return bucket;
  const Range own = pages_->owned(page);
  return bucket.narrow(0, own.begin, own.numel());
}

at::Tensor WholeBuckets::wire(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  const at::Tensor bucket = of_page.bucket.get();
  const at::ScalarType dtype = pages_->plan()[page].reduce_dtype;
  if (dtype == bucket.scalar_type()) return bucket;
  const memory::KindScope kind(memory::Kind::kBucket);
  of_page.wire = pages_->shards(page).communicator().buffer(bucket.numel(), dtype);
  of_page.wire.copy_(bucket);
  return of_page.wire;
}

void WholeBuckets::close(size_t page, Backwards /*backwards*/) {
  take_wire(page);
  if (adds_up(page)) WholeBuckets::complete(page);
}

void WholeBuckets::take_wire(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (!of_page.wire.defined()) return;
  const Range own = pages_->owned(page);
  owned(page).copy_(of_page.wire.narrow(0, own.begin, own.numel()));
  of_page.wire.reset();
}

bool WholeBuckets::adds_up(size_t page) const {
  const MicroStepSums& kept = pages_of_gradients_[page].kept;
  return kept.order() == SumOrder::kRunning && !kept.empty();
}

bool WholeBuckets::complete(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (of_page.kept.empty()) return false;
  const at::Tensor sum = owned(page);
  if (sum.defined()) {
    of_page.kept.add_to(sum);
  } else {
    // It was zeroed.
    of_page.kept.clear();
  }
  return sum.defined();
}

void WholeBuckets::keep(size_t page, const std::vector<Range>& forgotten) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  {
    const memory::KindScope kind(memory::Kind::kGradient);
    of_page.kept.push(owned(page));
  }
  for (const Range& range : forgotten) forget(page, range);
}

void WholeBuckets::forget(size_t page) {
  pages_of_gradients_[page].kept.clear();
  bucket(page).reset();
}

void WholeBuckets::skip(size_t page) {
  pages_of_gradients_[page].kept.skip();
  bucket(page).reset();
}

void WholeBuckets::forget(size_t page, const Range& range) {
  const Range owned = pages_->owned(page);
  const Range zeroed = intersection(owned, range);
  if (zeroed.empty()) return;
  pages_of_gradients_[page].kept.zero(zeroed.begin - owned.begin, zeroed.numel());
}

std::string WholeBuckets::describe(size_t page) const {
  return "the gradient of " + pages_->describe(page);
}

comm::Pending ReplicatedBuckets::start_reduction(size_t page, comm::ReduceOp op) {
  const at::Tensor sum = wire(page);
  count_all_ranks(pages(), page, op, sum);
  return pages().world(page).communicator().all_reduce(sum, op, describe(page));
}

const PlacedParameter& ReplicatedBuckets::Slots::placed(size_t parameter) const {
  return gradients_.pages().parameters()[parameter];
}

bool ReplicatedBuckets::Slots::is(size_t parameter, const at::Tensor& gradient) const {
  const PlacedParameters& parameters = gradients_.pages().parameters();
  return gradients_.bucket(parameters.page(parameter)).has(gradient) &&
         is_slot(gradient, parameters, parameter);
}

at::Tensor ReplicatedBuckets::Slots::of(size_t parameter) {
  const PlacedParameter& of = placed(parameter);
  at::Tensor slot = slot_in(gradients_.bucket(of.page).get(), of);
  parallel::mark_as_gradient(slot, of.parameter.tensor);
  return slot;
}

void ReplicatedBuckets::Slots::set_before_use(BeforeUse call) {
  if (before_use_ != nullptr) *before_use_ = nullptr;
  before_use_ = call ? std::make_shared<BeforeUse>(std::move(call)) : nullptr;
  if (before_use_ == nullptr) return;
  paging::check_dispatcher();
  const auto mark = c10::make_intrusive<UseMark>();
  mark->follow(before_use_);
  for (const PlacedParameter& placed : gradients_.pages().parameters()) {
    const at::Tensor& gradient = placed.parameter.tensor.grad();
    if (!gradient.defined()) continue;
    if (operators::TensorMark* const other = operators::mark_of(gradient)) {
      other->follow(before_use_);
    } else {
      operators::set_mark(gradient, mark);
    }
  }
}

at::Tensor ReplicatedBuckets::Slots::replaced(size_t parameter, const at::Tensor& gradient) {
  GradientMemory& bucket = gradients_.bucket(placed(parameter).page);
  if (!bucket.get().defined()) gradients_.renew(placed(parameter).page);
  at::Tensor slot = of(parameter);
  bucket.let_go();
  const parallel::SlicesAsTheyAre scope;
  slot.copy_(gradient);
  return slot;
}

}  // namespace zeropage::zero
