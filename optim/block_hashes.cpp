#include "optim/block_hashes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "base/block_checksum.h"
#include "optim/cuda/block_hashes.h"
#include "optim/cuda/current_stream.h"
#include "optim/flat_tensor.h"
#include "optim/parallel.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

constexpr const char* kBlockHashes = "block_hashes";

// The least that is worth a thread of its own.
constexpr int64_t kHashedBlocksPerThread = 256;

// Where there is no kernel of ours. Odd factors: a word that changed changes the sum.
at::Tensor hashes_by_operators(const at::Tensor& flat) {
  const at::Tensor words = flat.view(at::kInt).view({flat.numel() / kHashedNumel, -1});
  constexpr auto kEven = static_cast<int64_t>(0x9e3779b97f4a7c14);
  const at::Tensor factors =
      at::arange(1, words.size(1) + 1, words.options().dtype(at::kLong)) * kEven + 1;
  return (words.to(at::kLong) * factors).sum(1);
}

}  // namespace

at::Tensor block_hashes(const at::Tensor& flat) {
  ZP_CHECK(flat.dim() == 1 && flat.numel() % kHashedNumel == 0, kBlockHashes,
           ": flat: expected a 1-D tensor of whole blocks of ", kHashedNumel,
           " elements, got sizes ", flat.sizes(), "; pad it");
  const int64_t blocks = flat.numel() / kHashedNumel;
  if (!flat.is_cpu() && !flat.is_cuda() && !flat.is_meta()) return hashes_by_operators(flat);
  precision_of({kBlockHashes, "flat"}, flat);
  at::Tensor hashes = at::empty({blocks}, flat.options().dtype(at::kLong).requires_grad(false));
  if (flat.is_meta() || blocks == 0) return hashes;
  const int64_t block_bytes = kHashedNumel * static_cast<int64_t>(flat.element_size());
  auto* const to = hashes.mutable_data_ptr<int64_t>();
  if (flat.is_cpu()) {
    const auto* const bytes = static_cast<const std::byte*>(flat.const_data_ptr());
    parallel_for(blocks, kHashedBlocksPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        to[block] =
            static_cast<int64_t>(base::block_checksum(bytes + block * block_bytes, block_bytes));
      }
    });
  } else {
    const c10::DeviceGuard guard(flat.device());
    optim::cuda::block_hashes(static_cast<const uint32_t*>(flat.const_data_ptr()),
                              block_bytes / static_cast<int64_t>(sizeof(uint32_t)), blocks,
                              reinterpret_cast<uint64_t*>(to),
                              optim::cuda::current_stream(flat.device()));
  }
  return hashes;
}

}  // namespace zeropage::optim
