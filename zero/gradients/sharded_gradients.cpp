#include "zero/gradients/sharded_gradients.h"

#include <algorithm>
#include <utility>

#include "memory/event_sink.h"
#include "memory/ledger.h"
#include "zero/gradients/sum_order.h"
#include "zero/tiers/page_offload.h"

namespace zeropage {
ShardedGradients::ShardedGradients(std::shared_ptr<ParameterPages> pages, const Options& options)
    : pages_(std::move(pages)),
      order_(sum_order_of(options)),
      pages_of_gradients_(pages_->layouts().size()),
      replicas_(pages_),
      source_(new ShardSource(pages_->shards(), "the gradient of page", PagedGradients::kHint,
                              memory::Kind::kGradient)),
      paged_(pages_, std::unique_ptr<memory::PageSource>(source_),
             [this](size_t page) { replicas_.check_complete(page); }) {}

std::unique_ptr<ShardGradient> ShardedGradients::make_owned(size_t page) const {
  const PageLayout& layout = pages_->layouts()[page];
  const memory::OwnerScope owner("gradient", layout.name);
  const comm::Communicator& communicator = pages_->shards().communicator();
  const at::ScalarType dtype = pages_->plan()[page].gradient_dtype;
  if (pages_->offloads_optimizer(page)) {
    PageOffload& page_offload = *pages_->page_offload();
    return std::make_unique<OffloadedGradient>(
        page_offload.gradients().add(page, layout.shard_numel, dtype, 0, memory::Kind::kGradient),
        communicator.device(), order_, page_offload.copies());
  }
  const memory::KindScope kind(memory::Kind::kGradient);
  return std::make_unique<ResidentGradient>(communicator.buffer(layout.shard_numel, dtype).zero_(),
                                            order_);
}

void ShardedGradients::begin_training(size_t page, const std::vector<size_t>& parameters) {
  pages_of_gradients_[page].gaps = gaps_between(page, parameters);
  if (paged_.has(page)) return;
  const PageLayout& layout = pages_->layouts()[page];
  pages_of_gradients_[page].owned = make_owned(page);
  const at::Tensor& owned = pages_of_gradients_[page].owned->values();
  ShardSource::Away away;
  if (pages_->offloads_optimizer(page)) {
    away = {.storage = &pages_->page_offload()->gradients(),
            .page = page,
            .page_offload = pages_->page_offload(),
            .changes_at_any_time = true};
  }
  const int64_t bytes = source_->add_shard(layout, owned, away);
  paged_.add_page(page, bytes, owned.scalar_type());
}

std::vector<Range> ShardedGradients::gaps_between(size_t page,
                                                  const std::vector<size_t>& parameters) const {
  std::vector<Range> taken;
  for (const size_t index : parameters) taken.push_back(pages_->parameters()[index].range);
  std::sort(taken.begin(), taken.end(),
            [](const Range& left, const Range& right) { return left.begin < right.begin; });
  const int64_t end = pages_->layouts()[page].padded_numel(pages_->shards().size());
  taken.push_back({end, end});
  std::vector<Range> gaps;
  int64_t begin = 0;
  for (const Range& range : taken) {
    if (range.begin > begin) gaps.push_back({begin, range.begin});
    begin = range.end;
  }
  return gaps;
}

const at::Tensor& ShardedGradients::open(size_t page, Collect collect) {
  at::Tensor& bucket = pages_of_gradients_[page].bucket;
  if (!bucket.defined()) {
    const PageLayout& layout = pages_->layouts()[page];
    const memory::KindScope kind(memory::Kind::kBucket);
    const memory::OwnerScope owner("gradient bucket", layout.name);
    const comm::World& shards = pages_->shards();
    bucket = shards.communicator().buffer(layout.padded_numel(shards.size()),
                                          collect == Collect::kLocally
                                              ? pages_->plan()[page].gradient_dtype
                                              : pages_->plan()[page].reduce_dtype);
    // They are reduced too.
    for (const Range& gap : pages_of_gradients_[page].gaps) {
      bucket.narrow(0, gap.begin, gap.numel()).zero_();
    }
  }
  return bucket;
}

comm::Pending ShardedGradients::start_reduction(size_t page, comm::ReduceOp op) {
  const PageLayout& layout = pages_->layouts()[page];
  at::Tensor& bucket = pages_of_gradients_[page].bucket;
  {
    const memory::KindScope kind(memory::Kind::kBucket);
    bucket = open(page, Collect::kForReduction).to(pages_->plan()[page].reduce_dtype);
  }
  replicas_.begin(page, op);
  return pages_->shards().communicator().reduce_scatter(
      bucket, op, "the gradient of page \"" + layout.name + "\"");
}

void ShardedGradients::close(size_t page, Backwards backwards) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  const Range own = pages_->owned(page);
  const at::Tensor mean = of_page.bucket.narrow(0, own.begin, own.numel());
  // What leaves at once has to be what all ranks have.
  if (is_offloaded(page)) replicas_.reduce(page, mean);
  of_page.owned->take(mean, backwards);
  if (!is_offloaded(page)) replicas_.close(page, of_page.owned->values(), backwards);
  if (!of_page.owned->arrival().done()) memory::assign(of_page.bucket, memory::Kind::kStaging);
  of_page.bucket.reset();
  if (leaving_) pages_of_gradients_[*leaving_].owned->wait();
  leaving_ = page;
}

bool ShardedGradients::complete(size_t page) {
  const bool has_changed = pages_of_gradients_[page].owned->complete();
  return replicas_.complete(page, owned(page)) || has_changed;
}

void ShardedGradients::keep(size_t page, const std::vector<Range>& forgotten) {
  paged_.release("backward()");
  for (const Range& range : forgotten) forget(page, range);
  pages_of_gradients_[page].owned->keep();
}

void ShardedGradients::forget(size_t page) {
  paged_.release("backward()");
  pages_of_gradients_[page].owned->forget();
  replicas_.forget(page);
}

void ShardedGradients::skip(size_t page) {
  paged_.release("backward()");
  pages_of_gradients_[page].owned->skip();
}

void ShardedGradients::forget(size_t page, const Range& range) {
  const Range own = pages_->owned(page);
  const Range zeroed = intersection(own, range);
  if (zeroed.empty()) return;
  pages_of_gradients_[page].owned->zero({zeroed.begin - own.begin, zeroed.end - own.begin});
}

void ShardedGradients::replace(size_t parameter, const at::Tensor& gradient) {
  paged_.of(parameter).copy_(gradient);
}

void ShardedGradients::gather(const std::vector<size_t>& parameters, memory::Pins& pins) {
  paged_.gather(parameters, pins);
}

// The last one's way down is all that backward did not hide.
void ShardedGradients::note_reduced() {
  replicas_.wait();
  for (const PageOfGradients& of_page : pages_of_gradients_) {
    if (of_page.owned) of_page.owned->wait();
  }
  leaving_.reset();
}

void ShardedGradients::take_over_changes() {
  paged_.release("step()");
}

}  // namespace zeropage
