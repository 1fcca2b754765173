#include "zero/gradients/owned_gradients.h"

#include <utility>

namespace zeropage {

// A whole gradient is the page's bucket, once the shards of the other ranks are in it.
class OwnedGradients::BucketSource final : public memory::PageSource {
 public:
  explicit BucketSource(OwnedGradients& gradients) : gradients_(gradients) {}

  void add(size_t page) {
    entries_.push_back({gradients_.describe(page) + PagedGradients::kHint, page});
  }

  memory::Fetch start_fetch(size_t entry) override {
    const auto& [what, page] = entries_[entry];
    const at::Tensor bucket = gradients_.bucket(page).get();
    return {bucket, gradients_.pages().shards().communicator().all_gather(bucket, what)};
  }
  // It was written where it stays.
  void write_back(size_t /*entry*/, const at::Tensor& /*buffer*/) override {}

 private:
  struct Entry {
    std::string what;
    size_t page;
  };

  OwnedGradients& gradients_;
  std::vector<Entry> entries_;
};

OwnedGradients::OwnedGradients(std::shared_ptr<ParameterPages> of_pages, const Options& options)
    : WholeGradients(of_pages, options),
      replicas_(of_pages),
      buckets_(*this),
      source_(new BucketSource(*this)),
      paged_(of_pages, std::unique_ptr<memory::PageSource>(source_), buckets_) {}

void OwnedGradients::begin_training(size_t page, const std::vector<size_t>& parameters) {
  WholeGradients::begin_training(page, parameters);
  if (paged_.has(page)) return;
  source_->add(page);
  paged_.add_page(page, /*bytes=*/0, pages().plan()[page].gradient_dtype);
}

comm::Pending OwnedGradients::start_reduction(size_t page, comm::ReduceOp op) {
  replicas_.begin(page, op);
  return pages().shards().communicator().reduce_scatter(wire(page), op, describe(page));
}

void OwnedGradients::close(size_t page, Backwards backwards) {
  WholeGradients::close(page, backwards);
  replicas_.close(page, owned(page), backwards);
}

bool OwnedGradients::complete(size_t page) {
  const bool has_changed = WholeGradients::complete(page);
  return replicas_.complete(page, owned(page)) || has_changed;
}

void OwnedGradients::keep(size_t page, const std::vector<Range>& forgotten) {
  paged_.release("backward()");
  WholeGradients::keep(page, forgotten);
}

void OwnedGradients::forget(size_t page) {
  paged_.release("backward()");
  WholeGradients::forget(page);
  replicas_.forget(page);
}

void OwnedGradients::skip(size_t page) {
  paged_.release("backward()");
  WholeGradients::skip(page);
}

}  // namespace zeropage
