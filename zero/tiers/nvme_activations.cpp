#include "offload/nvme_heap.h"
#include "zeropage/activation_offload.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage {
namespace {

offload::NvmeFileOptions file_options(const NvmeActivationsOptions& options) {
  offload::NvmeFileOptions file;
  file.directory = options.directory;
  file.name = c10::str("rank-", options.rank, ".activations");
  file.owner = "activations";
  file.kind = memory::Kind::kActivationOffloaded;
  return file;
}

class InHeap final : public checkpointing::StoredActivation {
 public:
  InHeap(std::shared_ptr<offload::NvmeHeap> heap, offload::NvmeHeap::Handle record)
      : heap_(std::move(heap)), record_(std::move(record)) {}

  memory::Pending start_get(const at::Tensor& bytes) override {
    return heap_->start_get(record_, bytes);
  }

 private:
  const std::shared_ptr<offload::NvmeHeap> heap_;
  const offload::NvmeHeap::Handle record_;
};

}  // namespace

NvmeActivations::NvmeActivations(const NvmeActivationsOptions& options)
    : writing_bytes_(options.writing_bytes),
      heap_(std::make_shared<offload::NvmeHeap>(file_options(options))) {
  ZP_CHECK(options.writing_bytes >= 0, "NvmeActivations: expected writing_bytes of 0 or more, got ",
           options.writing_bytes);
}

int64_t NvmeActivations::alignment() const {
  return offload::kNvmeAlignment;
}

std::unique_ptr<checkpointing::StoredActivation> NvmeActivations::put(const at::Tensor& bytes) {
  const std::lock_guard lock(mutex_);
  make_room(bytes.numel());
  auto put = heap_->start_put(bytes, bytes.numel());
  writing_.emplace_back(std::move(put.write), bytes.numel());
  in_flight_bytes_ += bytes.numel();
  return std::make_unique<InHeap>(heap_, std::move(put.record));
}

// Under mutex_. Waits for the oldest writes.
void NvmeActivations::make_room(int64_t bytes) {
  while (!writing_.empty() &&
         (writing_.front().first.done() || in_flight_bytes_ + bytes > writing_bytes_)) {
    const auto [write, written_bytes] = std::move(writing_.front());
    writing_.pop_front();
    in_flight_bytes_ -= written_bytes;
    write.wait();
  }
}

std::string NvmeActivations::describe() const {
  return "in " + heap_->path();
}

}  // namespace zeropage
