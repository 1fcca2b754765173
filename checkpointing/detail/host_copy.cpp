#include "checkpointing/detail/host_copy.h"

#include <cstdint>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include "device/stream.h"
#include "memory/charged_block.h"
#include "memory/exact.h"

namespace zeropage::checkpointing::detail {
namespace {

// Page-locked memory does not come from the allocator that the ledger wraps. That which it comes from
// does not give it out again before the copies that were enqueued have ended.
struct PinnedBlock {
  PinnedBlock(int64_t bytes, c10::DeviceType device)
      : charge(bytes, c10::DeviceType::CPU),
        data(at::globalContext().getPinnedMemoryAllocator(device)->allocate(
            static_cast<size_t>(bytes))) {}
  const memory::ChargedBlock charge;
  c10::DataPtr data;
};

int64_t past_alignment(const at::Tensor& bytes, int64_t alignment) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) %
                              static_cast<uintptr_t>(alignment));
}

}  // namespace

HostCopy::HostCopy(std::shared_ptr<memory::Ledger> ledger, std::shared_ptr<ActivationStore> store,
                   Encoded form, c10::Device device)
    : ledger_(std::move(ledger)), store_(std::move(store)), form_(form), device_(device) {}

const at::Tensor& HostCopy::allocate() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const memory::LedgerScope ledger(ledger_);
  const memory::KindScope kind(memory::Kind::kActivationOffloaded);
  const int64_t alignment = store_ ? store_->alignment() : 1;
  const int64_t padded = memory::round_up(form_.bytes(), alignment);
  bytes_ = host_bytes(padded);
  if (past_alignment(bytes_, alignment) != 0) {
    const at::Tensor longer = host_bytes(padded + alignment);
    const int64_t past = past_alignment(longer, alignment);
    bytes_ = longer.narrow(0, past == 0 ? 0 : alignment - past, padded);
  }
  values_ = bytes_.narrow(0, 0, form_.bytes()).view(form_.dtype);
  return values_;
}

// uint8 [bytes] in memory that copies of the device read and write beside the host.
at::Tensor HostCopy::host_bytes(int64_t bytes) const {
  if (!memory::has_streams(device_.type())) return at::empty({bytes}, at::kByte);
  auto block = std::make_shared<PinnedBlock>(bytes, device_.type());
  void* const data = block->data.get();
  return at::from_blob(
      data, {bytes}, [block = std::move(block)](void*) {}, at::kByte);
}

void HostCopy::free_memory() {
  values_.reset();
  bytes_.reset();
}

void HostCopy::go_to_store() {
  if (!store_ || stored_) return;
  stored_ = store_->put(bytes_);
  free_memory();
}

void HostCopy::read_ahead() {
  if (!stored_ || bytes_.defined()) return;
  allocate();
  reading_ = stored_->start_get(bytes_);
}

const at::Tensor& HostCopy::values() {
  read_ahead();
  if (!reading_) return values_;
  const memory::Pending reading = *std::exchange(reading_, std::nullopt);
  try {
    reading.wait();
  } catch (...) {
    free_memory();
    throw;
  }
  return values_;
}

void HostCopy::let_go() {
  if (stored_) free_memory();
}

void HostCopy::stop_reading() {
  if (!reading_) return;
  free_memory();
  reading_.reset();
}

}  // namespace zeropage::checkpointing::detail
