#include "offload/flat_norm.h"

#include <atomic>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "memory/check.h"
#include "offload/cpu/flat_norm.h"
#include "offload/cuda/flat_norm.h"
#include "offload/flat_tensor.h"

namespace zeropage::offload {
namespace {

// The least that is worth a thread of its own.
constexpr int64_t kBlocksPerThread = 128;
constexpr int64_t kChunksPerThread = 8;
constexpr int64_t kNumelPerThread = kBlocksPerThread * kBlockNumel;

at::Tensor sums_of_chunks(const at::Tensor& terms) {
  const int64_t chunks = parts_of<int64_t>(terms.numel(), kChunkNumel);
  at::Tensor sums = at::empty({chunks}, terms.options());
  if (terms.is_meta()) return sums;
  const auto* const from = terms.const_data_ptr<double>();
  auto* const to = sums.mutable_data_ptr<double>();
  if (terms.is_cpu()) {
    at::parallel_for(0, chunks, kChunksPerThread, [&](int64_t begin, int64_t end) {
      cpu::sum_chunks(from, terms.numel(), to, begin, end);
    });
  } else {
    const c10::DeviceGuard guard(terms.device());
    cuda::sum_chunks(from, terms.numel(), to, current_stream(terms.device()));
  }
  return sums;
}

}  // namespace

at::Tensor block_sums_of_squares(const at::Tensor& flat) {
  const Role role{"block_sums_of_squares", "flat"};
  check_flat(role, flat);
  const Precision precision = precision_of(role, flat);
  const int64_t blocks = parts_of<int64_t>(flat.numel(), kBlockNumel);
  at::Tensor sums = at::empty({blocks}, flat.options().dtype(at::kDouble).requires_grad(false));
  if (flat.is_meta() || blocks == 0) return sums;
  const void* const from = flat.const_data_ptr();
  auto* const to = sums.mutable_data_ptr<double>();
  if (flat.is_cpu()) {
    at::parallel_for(0, blocks, kBlocksPerThread, [&](int64_t begin, int64_t end) {
      cpu::block_sums_of_squares(from, precision, flat.numel(), to, begin, end);
    });
  } else {
    const c10::DeviceGuard guard(flat.device());
    cuda::block_sums_of_squares(from, precision, flat.numel(), to, current_stream(flat.device()));
  }
  return sums;
}

at::Tensor sum_in_order(const at::Tensor& terms) {
  check_flat({"sum_in_order", "terms"}, terms);
  ZP_CHECK(terms.scalar_type() == at::kDouble, "sum_in_order: terms: expected fp64, got ",
           terms.scalar_type(), "; block_sums_of_squares() makes them");
  if (terms.numel() == 0) return at::zeros({1}, terms.options());
  at::Tensor sums = sums_of_chunks(terms);
  while (sums.numel() > 1) sums = sums_of_chunks(sums);
  return sums;
}

at::Tensor found_inf(const at::Tensor& flat) {
  const Role role{"found_inf", "flat"};
  check_flat(role, flat);
  const Precision precision = precision_of(role, flat);
  at::Tensor found = at::zeros({1}, flat.options().dtype(at::kFloat).requires_grad(false));
  if (flat.is_meta() || flat.numel() == 0) return found;
  const void* const from = flat.const_data_ptr();
  if (flat.is_cpu()) {
    std::atomic<bool> any = false;
    at::parallel_for(0, flat.numel(), kNumelPerThread, [&](int64_t begin, int64_t end) {
      if (cpu::any_not_finite(from, precision, begin, end)) any = true;
    });
    if (any) found.fill_(1);
  } else {
    const c10::DeviceGuard guard(flat.device());
    cuda::look_for_not_finite(from, precision, flat.numel(), found.mutable_data_ptr<float>(),
                              current_stream(flat.device()));
  }
  return found;
}

}  // namespace zeropage::offload
