#include "zero/gradients/owned_buckets.h"

#include <utility>

#include "zero/gradients/expert_mean.h"

namespace zeropage::zero {

// A whole gradient is the page's bucket, once the shards of the other ranks are in it.
class OwnedBuckets::BucketSource final : public paging::PageSource {
 public:
  explicit BucketSource(OwnedBuckets& gradients) : gradients_(gradients) {}

  void add(size_t page) {
    entries_.push_back({gradients_.describe(page) + ReadableGradients::kHint, page});
  }

  paging::Fetch start_fetch(size_t entry) override {
    const auto& [what, page] = entries_[entry];
    const at::Tensor bucket = gradients_.bucket(page).get();
    return {bucket, gradients_.pages().shards(page).communicator().all_gather(bucket, what)};
  }
  // It was written where it stays.
  void write_back(size_t /*entry*/, const at::Tensor& /*buffer*/) override {}

 private:
  struct Entry {
    std::string what;
    size_t page;
  };

  OwnedBuckets& gradients_;
  std::vector<Entry> entries_;
};

OwnedBuckets::OwnedBuckets(std::shared_ptr<ParameterPages> of_pages, const Options& options)
    : WholeBuckets(of_pages, options),
      replicas_(of_pages),
      buckets_(*this),
      source_(new BucketSource(*this)),
      paged_(of_pages, std::unique_ptr<paging::PageSource>(source_), buckets_) {}

void OwnedBuckets::begin_training(size_t page, const std::vector<size_t>& parameters) {
  WholeBuckets::begin_training(page, parameters);
  if (paged_.has(page)) return;
  source_->add(page);
  paged_.add_page(page, /*bytes=*/0, pages().plan()[page].gradient_dtype);
}

comm::Pending OwnedBuckets::start_reduction(size_t page, comm::ReduceOp op) {
  replicas_.begin(page, op);
  const at::Tensor sum = wire(page);
  count_all_ranks(pages(), page, op, sum);
  return pages().shards(page).communicator().reduce_scatter(sum, op, describe(page));
}

void OwnedBuckets::close(size_t page, Backwards backwards) {
  take_wire(page);
  const bool travels_alone = adds_up(page) && !replicas_.is_of_group(page);
  if (travels_alone) replicas_.reduce(page, owned(page));
  WholeBuckets::close(page, backwards);
  if (!travels_alone) replicas_.close(page, owned(page), backwards);
}

bool OwnedBuckets::complete(size_t page) {
  const bool has_changed = WholeBuckets::complete(page);
  return replicas_.complete(page, owned(page)) || has_changed;
}

void OwnedBuckets::keep(size_t page, const std::vector<Range>& forgotten) {
  paged_.release("backward()");
  WholeBuckets::keep(page, forgotten);
}

void OwnedBuckets::forget(size_t page) {
  paged_.release("backward()");
  WholeBuckets::forget(page);
  replicas_.forget(page);
}

void OwnedBuckets::skip(size_t page) {
  paged_.release("backward()");
  WholeBuckets::skip(page);
}

}  // namespace zeropage::zero
