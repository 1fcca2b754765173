#include "offload/flat_norm.h"

#include <atomic>

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "memory/check.h"
#include "offload/cpu/flat_norm.h"
#include "offload/cuda/current_stream.h"
#include "offload/cuda/flat_norm.h"
#include "offload/flat_tensor.h"
#include "offload/parallel.h"

namespace zeropage::offload {
namespace {

// The least that is worth a thread of its own.
constexpr int64_t kNormBlocksPerThread = 128;
constexpr int64_t kNormNumelPerThread = kNormBlocksPerThread * kBlockNumel;

// Where there is no kernel of ours: the same tree in LibTorch's operators, in 2 fp64 copies.
at::Tensor sums_by_operators(const at::Tensor& flat) {
  ZP_CHECK(flat.dim() == 1 && flat.is_floating_point(),
           "block_sums_of_squares: flat: expected a 1-D tensor of floating point, got sizes ",
           flat.sizes(), " of ", flat.scalar_type());
  const int64_t blocks = parts_of<int64_t>(flat.numel(), kBlockNumel);
  const int64_t missing = blocks * kBlockNumel - flat.numel();
  const at::Tensor wide = at::constant_pad_nd(flat.to(at::kDouble), {0, missing});
  at::Tensor sums = (wide * wide).view({blocks, kBlockNumel});
  for (int64_t half = kBlockNumel / 2; half > 0; half /= 2) {
    sums = sums.narrow(1, 0, half) + sums.narrow(1, half, half);
  }
  return sums.view({blocks});
}

}  // namespace

at::Tensor block_sums_of_squares(const at::Tensor& flat) {
  if (!flat.is_cpu() && !flat.is_cuda() && !flat.is_meta()) return sums_by_operators(flat);
  const FlatElements elements = flat_elements({"block_sums_of_squares", "flat"}, flat);
  const int64_t blocks = parts_of<int64_t>(flat.numel(), kBlockNumel);
  at::Tensor sums = at::empty({blocks}, flat.options().dtype(at::kDouble).requires_grad(false));
  if (flat.is_meta() || blocks == 0) return sums;
  auto* const to = sums.mutable_data_ptr<double>();
  if (flat.is_cpu()) {
    parallel_for(blocks, kNormBlocksPerThread, [&](int64_t begin, int64_t end) {
      cpu::block_sums_of_squares(elements, flat.numel(), to, begin, end);
    });
  } else {
    const c10::DeviceGuard guard(flat.device());
    cuda::block_sums_of_squares(elements, flat.numel(), to, cuda::current_stream(flat.device()));
  }
  return sums;
}

at::Tensor found_inf(const at::Tensor& flat) {
  const FlatElements elements = flat_elements({"found_inf", "flat"}, flat);
  at::Tensor found = at::zeros({1}, flat.options().dtype(at::kFloat).requires_grad(false));
  if (flat.is_meta() || flat.numel() == 0) return found;
  if (flat.is_cpu()) {
    std::atomic<bool> any = false;
    parallel_for(flat.numel(), kNormNumelPerThread, [&](int64_t begin, int64_t end) {
      if (cpu::any_not_finite(elements, begin, end)) any = true;
    });
    if (any) found.fill_(1);
  } else {
    const c10::DeviceGuard guard(flat.device());
    cuda::look_for_not_finite(elements, flat.numel(), found.mutable_data_ptr<float>(),
                              cuda::current_stream(flat.device()));
  }
  return found;
}

}  // namespace zeropage::offload
