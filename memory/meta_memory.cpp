#include "memory/meta_memory.h"

#include <memory>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include "memory/storage.h"

namespace zeropage::memory {
namespace {

// A meta tensor's data is null; its block is the context beside it.
void release_meta_block(void* context) {
  delete static_cast<ChargedBlock*>(context);
}

class LedgerMetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device meta(c10::DeviceType::Meta);
    if (bytes == 0) return {nullptr, meta};
    auto block = std::make_unique<ChargedBlock>(static_cast<int64_t>(bytes), meta.type());
    return {nullptr, block.release(), &release_meta_block, meta};
  }

  void copy_data(void* /*destination*/, const void* /*source*/,
                 std::size_t /*count*/) const override {}
};

// A charge in a tier, as long as it lives.
class TierCharge {
 public:
  TierCharge(Tier tier, Kind kind, int64_t bytes)
      : ledger_(Ledger::current()), tier_(tier), kind_(kind), bytes_(bytes) {
    ledger_->charge_offloaded(tier_, kind_, bytes_);
  }
  ~TierCharge() { ledger_->discharge_offloaded(tier_, kind_, bytes_); }
  TierCharge(const TierCharge&) = delete;
  TierCharge& operator=(const TierCharge&) = delete;

 private:
  const std::shared_ptr<Ledger> ledger_;
  const Tier tier_;
  const Kind kind_;
  const int64_t bytes_;
};

}  // namespace

void observe_meta_memory() {
  static const bool installed = [] {
    static auto* const allocator = new LedgerMetaAllocator;
    c10::SetAllocator(c10::DeviceType::Meta, allocator, /*priority=*/100);
    return true;
  }();
  static_cast<void>(installed);
}

ChargedBlock* meta_block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &release_meta_block) return nullptr;
  return static_cast<ChargedBlock*>(data.get_context());
}

at::Tensor meta_tensor_in(Tier tier, int64_t numel, at::ScalarType dtype, Kind kind) {
  const c10::Device meta(c10::DeviceType::Meta);
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const c10::Storage storage = storage_without_memory(bytes, meta);
  auto charge = std::make_unique<TierCharge>(tier, kind, bytes);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
      {nullptr, charge.release(), [](void* context) { delete static_cast<TierCharge*>(context); },
       meta});
  const at::Tensor like = at::empty({0}, at::TensorOptions(meta).dtype(dtype));
  like.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor_in(storage, like, /*offset=*/0, dtype);
}

}  // namespace zeropage::memory
