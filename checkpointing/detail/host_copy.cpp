#include "checkpointing/detail/host_copy.h"

#include <cstdint>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/exact.h"
#include "device/page_locked.h"
#include "device/stream.h"
#include "memory/charged_block.h"

namespace zeropage::checkpointing::detail {
namespace {

int64_t past_alignment(const at::Tensor& bytes, int64_t alignment) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) %
                              static_cast<uintptr_t>(alignment));
}

at::Tensor pageable(int64_t bytes, int64_t alignment) {
  at::Tensor memory = at::empty({bytes}, at::kByte);
  if (past_alignment(memory, alignment) == 0) return memory;
  memory = at::empty({bytes + alignment}, at::kByte);
  const int64_t past = past_alignment(memory, alignment);
  return memory.narrow(0, past == 0 ? 0 : alignment - past, bytes);
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
  const int64_t padded = base::round_up(form_.bytes(), alignment);
  bytes_ = host_bytes(padded, alignment);
  values_ = bytes_.narrow(0, 0, form_.bytes()).view(form_.dtype);
  return values_;
}

// uint8 [bytes] in memory that copies of the device read and write beside the host.
at::Tensor HostCopy::host_bytes(int64_t bytes, int64_t alignment) const {
  if (!device::has_streams(device_.type())) return pageable(bytes, alignment);
  return device::page_locked(
      bytes, {.device = device_,
              .alignment = alignment,
              .kept = std::make_shared<const memory::ChargedBlock>(bytes, c10::DeviceType::CPU)});
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
