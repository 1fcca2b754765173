#include "zero/tiers/tier_storage.h"

#include <utility>

#include <ATen/ops/from_blob.h>

#include "device/pinned_arena.h"

namespace zeropage::zero {

at::Tensor HostStorage::add(size_t /*page*/, int64_t numel, at::ScalarType dtype, double initial,
                            memory::Kind kind) {
  const device::Take take{numel, dtype};
  device::PinnedArena arena(device::PinnedArena::bytes_for({&take, 1}),
                            {.device = device_, .cores = cores_});
  const at::Tensor inside = arena.take(numel, dtype);
  const auto bytes = static_cast<int64_t>(inside.nbytes());
  ledger_->charge_offloaded(memory::Tier::kHost, kind, bytes);
  // The bytes are on the ledger for as long as the tensor's storage lives.
  const at::Tensor charged = at::from_blob(
      inside.mutable_data_ptr(), {numel},
      [inside, ledger = ledger_, kind, bytes](void*) {
        ledger->discharge_offloaded(memory::Tier::kHost, kind, bytes);
      },
      inside.options());
  if (initial != 0) charged.fill_(initial);
  return charged;
}

}  // namespace zeropage::zero
