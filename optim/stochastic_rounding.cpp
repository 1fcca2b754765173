#include "optim/stochastic_rounding.h"

#include <c10/core/DeviceGuard.h>

#include "optim/cpu/stochastic_rounding.h"
#include "optim/cuda/current_stream.h"
#include "optim/cuda/stochastic_rounding.h"
#include "optim/flat_tensor.h"
#include "optim/parallel.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

constexpr const char* kRoundStochastically = "round_stochastically";

// The least that is worth a thread of its own.
constexpr int64_t kRoundingNumelPerThread = 32768;

void check_tensors(const at::Tensor& from, const at::Tensor& to) {
  check_flat({kRoundStochastically, "from"}, from);
  check_flat({kRoundStochastically, "to"}, to);
  ZP_CHECK(from.scalar_type() == at::kFloat, kRoundStochastically, ": from: expected fp32, got ",
           from.scalar_type(), "; convert it with .to()");
  ZP_CHECK(to.scalar_type() == at::kBFloat16, kRoundStochastically, ": to: expected bf16, got ",
           to.scalar_type(), "; other precisions are rounded to nearest, by copy_()");
  ZP_CHECK(to.numel() == from.numel(), kRoundStochastically, ": to: expected ", from.numel(),
           " elements, as many as from, got ", to.numel(), "; pass the same stretch of both");
  ZP_CHECK(to.device() == from.device(), kRoundStochastically, ": to: expected it on ",
           from.device(), ", where from is, got ", to.device(), "; move it there");
}

void check_place(const RoundingPlace& place, int64_t numel) {
  ZP_CHECK(place.first_element >= 0 && place.first_element <= kMostRoundingNumel - numel,
           kRoundStochastically, ": first_element: expected 0 or more and ", numel,
           " elements from it within 2^51, got ", place.first_element,
           "; count from the tensor's beginning");
  ZP_CHECK(place.step < kMostRoundingSteps, kRoundStochastically,
           ": step: expected less than 2^48, got ", place.step, "; pass the optimizer's step");
  ZP_CHECK(place.tensor < kMostRoundingTensors, kRoundStochastically,
           ": tensor: expected less than 2^32, got ", place.tensor,
           "; pass the parameter's number");
}

}  // namespace

void round_stochastically(const at::Tensor& from, const at::Tensor& to,
                          const RoundingPlace& place) {
  check_tensors(from, to);
  const int64_t numel = from.numel();
  check_place(place, numel);
  if (from.is_meta() || numel == 0) return;
  const auto* const source = from.const_data_ptr<float>();
  auto* const target = static_cast<BFloat16Bits*>(to.mutable_data_ptr());
  if (from.is_cpu()) {
    parallel_for(numel, kRoundingNumelPerThread, [&](int64_t begin, int64_t end) {
      RoundingPlace own = place;
      own.first_element += begin;
      optim::cpu::round_stochastically(source + begin, target + begin, end - begin, own);
    });
  } else {
    const c10::DeviceGuard guard(from.device());
    optim::cuda::round_stochastically(source, target, numel, place,
                                      optim::cuda::current_stream(from.device()));
  }
  to.unsafeGetTensorImpl()->bump_version();
}

}  // namespace zeropage::optim
