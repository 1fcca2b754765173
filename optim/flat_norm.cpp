#include "optim/flat_norm.h"

#include <atomic>
#include <mutex>

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "optim/cpu/flat_norm.h"
#include "optim/cuda/current_stream.h"
#include "optim/cuda/flat_norm.h"
#include "optim/flat_tensor.h"
#include "optim/parallel.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

// The least that is worth a thread of its own.
constexpr int64_t kNormNumelPerThread = 32768;

}  // namespace

ExactSum sum_of_squares(const at::Tensor& flat) {
  const FlatElements elements = flat_elements({"sum_of_squares", "flat"}, flat);
  ZP_CHECK(flat.is_cpu(), "sum_of_squares: flat: expected a tensor on the host, got one on ",
           flat.device(), "; NormTable has sums of squares of tensors on devices");
  ExactSum sum;
  std::mutex mutex;
  parallel_for(flat.numel(), kNormNumelPerThread, [&](int64_t begin, int64_t end) {
    ExactDigits digits;
    optim::cpu::add_squares(elements, begin, end, digits);
    const std::scoped_lock lock(mutex);
    sum.add(digits);
  });
  return sum;
}

at::Tensor found_inf(const at::Tensor& flat) {
  const FlatElements elements = flat_elements({"found_inf", "flat"}, flat);
  at::Tensor found = at::zeros({1}, flat.options().dtype(at::kFloat).requires_grad(false));
  if (flat.is_meta() || flat.numel() == 0) return found;
  if (flat.is_cpu()) {
    std::atomic<bool> any = false;
    parallel_for(flat.numel(), kNormNumelPerThread, [&](int64_t begin, int64_t end) {
      if (optim::cpu::any_not_finite(elements, begin, end)) any = true;
    });
    if (any) found.fill_(1);
  } else {
    const c10::DeviceGuard guard(flat.device());
    optim::cuda::look_for_not_finite(elements, flat.numel(), found.mutable_data_ptr<float>(),
                                     optim::cuda::current_stream(flat.device()));
  }
  return found;
}

}  // namespace zeropage::optim
