#include "zero/gradients/owned_gradients.h"

#include <utility>

namespace zeropage {

// A whole gradient is the page's bucket, once the shards of the other ranks are in it.
class OwnedGradients::BucketSource final : public memory::PageSource {
 public:
  explicit BucketSource(comm::World shards) : shards_(std::move(shards)) {}

  void add(const std::string& page, at::Tensor bucket) {
    entries_.push_back(
        {"the gradient of page \"" + page + "\"" + PagedGradients::kHint, std::move(bucket)});
  }

  memory::Fetch start_fetch(size_t page) override {
    const Entry& entry = entries_[page];
    return {entry.bucket, shards_.communicator().all_gather(entry.bucket, entry.what)};
  }
  // It was written where it stays.
  void write_back(size_t /*page*/, const at::Tensor& /*buffer*/) override {}

 private:
  struct Entry {
    std::string what;
    at::Tensor bucket;  // [padded_numel]
  };

  const comm::World shards_;
  std::vector<Entry> entries_;
};

OwnedGradients::OwnedGradients(std::shared_ptr<ParameterPages> of_pages, const Options& options)
    : WholeGradients(of_pages, options),
      replicas_(of_pages),
      source_(new BucketSource(of_pages->shards())),
      paged_(of_pages, std::unique_ptr<memory::PageSource>(source_),
             [this](size_t page) { replicas_.check_complete(page); }) {}

void OwnedGradients::begin_training(size_t page, const std::vector<size_t>& parameters) {
  WholeGradients::begin_training(page, parameters);
  if (paged_.has(page)) return;
  const at::Tensor& bucket = open(page, Collect::kLocally);
  source_->add(pages().layouts()[page].name, bucket);
  paged_.add_page(page, /*bytes=*/0, bucket.scalar_type());
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

void OwnedGradients::replace(size_t parameter, const at::Tensor& gradient) {
  paged_.of(parameter).copy_(gradient);
}

void OwnedGradients::gather(const std::vector<size_t>& parameters, memory::Pins& pins) {
  paged_.gather(parameters, pins);
}

void OwnedGradients::take_over_changes() {
  paged_.release("step()");
}

}  // namespace zeropage
