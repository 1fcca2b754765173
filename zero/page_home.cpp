#include "zero/page_home.h"

#include <cstdlib>
#include <utility>

#include <ATen/ops/from_blob.h>

namespace zeropage {

at::Tensor HostHome::add(size_t /*page*/, int64_t numel, at::ScalarType dtype, double initial,
                         memory::Kind kind) {
  void* block = std::aligned_alloc(64, ((numel * c10::elementSize(dtype) + 63) / 64 + 1) * 64);
  const at::Tensor inside = at::from_blob(
      block, {numel}, [](void* p) { std::free(p); }, at::TensorOptions().dtype(dtype));
  const auto bytes = static_cast<int64_t>(inside.nbytes());
  ledger_->charge_offloaded(memory::Tier::kHost, kind, bytes);
  // The bytes are on the ledger for as long as the tensor's storage lives.
  return at::from_blob(
             inside.mutable_data_ptr(), {numel},
             [inside, ledger = ledger_, kind, bytes](void*) {
               ledger->discharge_offloaded(memory::Tier::kHost, kind, bytes);
             },
             inside.options())
      .fill_(initial);
}

}  // namespace zeropage
