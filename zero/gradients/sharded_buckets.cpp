#include "zero/gradients/sharded_buckets.h"

#include <utility>

#include "zero/gradients/bucket.h"
#include "zero/gradients/expert_mean.h"
#include "zero/tiers/page_offload.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {
ShardedBuckets::ShardedBuckets(std::shared_ptr<ParameterPages> pages, const Options& options)
    : pages_(std::move(pages)),
      order_(sum_order_of(options)),
      pages_of_gradients_(pages_->layouts().size()),
      replicas_(pages_),
      shards_(*this),
      source_(new ShardSource(pages_->shards(), "the gradient of page",
                              pages_->of_model() + ReadableGradients::kHint,
                              memory::Kind::kGradient)),
      paged_(pages_, std::unique_ptr<paging::PageSource>(source_), shards_) {}

GradientMemory* ShardedBuckets::Shards::memory(size_t page) {
  return gradients_.pages_of_gradients_[page].owned->memory();
}

void ShardedBuckets::Shards::renew(size_t page) {
  gradients_.pages_of_gradients_[page].owned->renew().zero_();
}

void ShardedBuckets::Shards::check_readable(size_t page) const {
  const auto& owned = gradients_.pages_of_gradients_[page].owned;
  ZP_CHECK(
      !owned || owned->has_sum(), "p.grad() of ", gradients_.pages_->describe(page),
      " is looked at between the micro-batches of a step: its sum so far is on the device, and "
      "comes to the host, where p.grad() is, with the last micro-batch "
      "(options.offload.optimizer); look behind the last backward() of the step, or keep the "
      "optimizer on the device");
  gradients_.replicas_.check_complete(page);
}

std::unique_ptr<AccumulatedShard> ShardedBuckets::make_owned(size_t page) const {
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("gradient", layout.name);
  const comm::Communicator& communicator = pages_->shards(page).communicator();
  const at::ScalarType dtype = pages_->plan()[page].gradient_dtype;
  if (pages_->offloads_optimizer(page)) {
    PageOffload& page_offload = *pages_->page_offload();
    return std::make_unique<OffloadedGradient>(
        page_offload.gradients().add(page, layout.shard_numel, dtype, 0, memory::Kind::kGradient),
        page_offload.gradients(), page, communicator.device(), order_, page_offload.copies());
  }
  return std::make_unique<ResidentGradient>(
      [&layout, &communicator, dtype] {
        const memory::KindScope kind(memory::Kind::kGradient);
        const memory::OwnerScope of_page("gradient", layout.name);
        return communicator.buffer(layout.shard_numel, dtype);
      },
      order_);
}

void ShardedBuckets::begin_training(size_t page, const std::vector<size_t>& parameters) {
  pages_of_gradients_[page].gaps = gaps_between(*pages_, page, parameters);
  if (paged_.has(page)) return;
  const PageLayout& layout = pages_->layouts()[page];
  pages_of_gradients_[page].owned = make_owned(page);
  const c10::ScalarType dtype = pages_->plan()[page].gradient_dtype;
  int64_t bytes = 0;
  if (pages_->offloads_optimizer(page)) {
    bytes = source_->add_shard(pages_->shards(page), layout, owned(page),
                               {.storage = &pages_->page_offload()->gradients(),
                                .page = page,
                                .page_offload = pages_->page_offload(),
                                .changes_at_any_time = true});
  } else {
    bytes = source_->add_shard(pages_->shards(page), layout, dtype,
                               [this, page] { return owned(page); });
  }
  paged_.add_page(page, bytes, dtype);
}

at::Tensor ShardedBuckets::open(size_t page, Collect collect) {
  const PageLayout& layout = pages_->layouts()[page];
  const memory::KindScope kind(memory::Kind::kBucket);
  const memory::OwnerScope owner("gradient bucket", layout.name);
  const comm::World& shards = pages_->shards(page);
  const PagePlan& plan = pages_->plan()[page];
  const at::Tensor made = shards.communicator().buffer(
      layout.padded_numel(shards.size()),
      collect == Collect::kLocally ? plan.gradient_dtype : plan.reduce_dtype);
  zero_gaps(made, pages_of_gradients_[page].gaps);
  pages_of_gradients_[page].bucket.set(made);
  return made;
}

void ShardedBuckets::let_go(size_t page) {
  pages_of_gradients_[page].bucket.let_go();
  pages_of_gradients_[page].owned->let_go();
}

comm::Pending ShardedBuckets::start_reduction(size_t page, comm::ReduceOp op) {
  GradientMemory& bucket = pages_of_gradients_[page].bucket;
  {
    const memory::KindScope kind(memory::Kind::kBucket);
    bucket.set(bucket.get().to(pages_->plan()[page].reduce_dtype));
  }
  replicas_.begin(page, op);
  count_all_ranks(*pages_, page, op, bucket.get());
  return pages_->shards(page).communicator().reduce_scatter(
      bucket.get(), op, "the gradient of " + pages_->describe(page));
}

void ShardedBuckets::close(size_t page, Backwards backwards) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  const Range own = pages_->owned(page);
  const at::Tensor bucket = of_page.bucket.get();
  const at::Tensor mean = bucket.narrow(0, own.begin, own.numel());
  // What leaves at once has to be what all ranks have.
  const bool travels_alone =
      is_offloaded(page) || (of_page.owned->adds_up() && !replicas_.is_of_group(page));
  if (travels_alone) replicas_.reduce(page, mean);
  of_page.owned->take(mean, backwards);
  if (!travels_alone) replicas_.close(page, of_page.owned->values(), backwards);
  if (!of_page.owned->arrival().done()) memory::assign(bucket, memory::Kind::kStaging);
  of_page.bucket.reset();
  if (leaving_) pages_of_gradients_[*leaving_].owned->wait();
  leaving_ = page;
}

bool ShardedBuckets::complete(size_t page) {
  const bool has_changed = pages_of_gradients_[page].owned->complete();
  return replicas_.complete(page, owned(page)) || has_changed;
}

void ShardedBuckets::keep(size_t page, const std::vector<Range>& forgotten) {
  paged_.release("backward()");
  for (const Range& range : forgotten) forget(page, range);
  pages_of_gradients_[page].owned->keep();
}

void ShardedBuckets::forget(size_t page) {
  paged_.release("backward()");
  pages_of_gradients_[page].owned->forget();
  replicas_.forget(page);
}

void ShardedBuckets::skip(size_t page) {
  paged_.release("backward()");
  pages_of_gradients_[page].owned->skip();
}

void ShardedBuckets::forget(size_t page, const Range& range) {
  const Range own = pages_->owned(page);
  const Range zeroed = intersection(own, range);
  if (zeroed.empty()) return;
  pages_of_gradients_[page].owned->zero({zeroed.begin - own.begin, zeroed.end - own.begin});
}

// The last one's way down is all that backward did not hide.
void ShardedBuckets::note_reduced() {
  replicas_.wait();
  for (const PageOfGradients& of_page : pages_of_gradients_) {
    if (of_page.owned) of_page.owned->wait();
  }
  leaving_.reset();
}

}  // namespace zeropage::zero
