#include "offload/fused_step.h"

#include <algorithm>
#include <variant>

#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>

#include "memory/check.h"
#include "offload/cpu/fused_step.h"
#include "offload/cuda/fused_step.h"
#include "offload/flat_tensor.h"
#include "offload/parallel.h"

namespace zeropage::offload::detail {
namespace {

constexpr const char* kWho = "fused_step";

// The least that is worth a thread of its own.
constexpr int64_t kNumelPerThread = 32768;

size_t states_of(const UpdateRule& rule) {
  return std::visit(
      []<typename Rule>(const Rule& /*rule*/) { return static_cast<size_t>(Rule::kStates); }, rule);
}

void check(const UpdateRule& rule, const Stretch& stretch, const GradientFactors& factors) {
  const at::Tensor& values = stretch.values;
  check_flat({kWho, "values"}, values);
  check_fp32({kWho, "values"}, values);
  check_alike({kWho, "gradient"}, stretch.gradient, values);
  precision_of({kWho, "gradient"}, stretch.gradient);
  const size_t expected = states_of(rule);
  ZP_CHECK(stretch.states.size() == expected, kWho, ": states: expected ", expected,
           " with these options, got ", stretch.states.size(),
           "; make them with make_states(options, values)");
  for (const at::Tensor& state : stretch.states) {
    check_alike({kWho, "a state"}, state, values);
    check_fp32({kWho, "a state"}, state);
  }
  if (stretch.copy_out.defined()) {
    check_alike({kWho, "copy_out"}, stretch.copy_out, values);
    const at::ScalarType dtype = stretch.copy_out.scalar_type();
    ZP_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf, kWho,
             ": copy_out: expected bf16 or fp16, got ", dtype,
             "; leave it undefined where the parameters themselves are fp32");
  }
  const at::Tensor& flag = factors.found_inf;
  if (flag.defined()) {
    ZP_CHECK(
        flag.numel() == 1 && flag.scalar_type() == at::kFloat && flag.device() == values.device(),
        kWho, ": found_inf: expected one fp32 number on ", values.device(), ", got ",
        flag.scalar_type(), " of sizes ", flag.sizes(), " on ", flag.device(),
        "; offload::found_inf(gradient) makes it");
  }
}

void check_one_device(const Stretch& stretch, const Stretch& first) {
  ZP_CHECK(stretch.values.device() == first.values.device(), kWho, ": stretches: expected all on ",
           first.values.device(), ", where the first is, got one on ", stretch.values.device(),
           "; make a call for each device");
}

FlatStretch flat_of(const Stretch& stretch, const GradientFactors& factors) {
  FlatStretch flat;
  flat.values = stretch.values.mutable_data_ptr<float>();
  flat.gradient_precision = precision_of({kWho, "gradient"}, stretch.gradient);
  if (factors.after == GradientAfter::kZeroed) {
    flat.gradient_to_zero = stretch.gradient.mutable_data_ptr();
  }
  flat.gradient = stretch.gradient.const_data_ptr();
  if (stretch.copy_out.defined()) {
    flat.copy_out = stretch.copy_out.mutable_data_ptr();
    flat.copy_precision = precision_of({kWho, "copy_out"}, stretch.copy_out);
  }
  for (size_t i = 0; i < stretch.states.size(); ++i) {
    flat.states[i] = stretch.states[i].mutable_data_ptr<float>();
  }
  flat.numel = stretch.values.numel();
  flat.gradient_scale = static_cast<float>(factors.scale);
  if (factors.found_inf.defined()) flat.found_inf = factors.found_inf.const_data_ptr<float>();
  return flat;
}

// Autograd then refuses a backward that would read the new values as if they were the old ones.
void bump_versions(const Stretch& stretch, const GradientFactors& factors) {
  stretch.values.unsafeGetTensorImpl()->bump_version();
  if (factors.after == GradientAfter::kZeroed) {
    stretch.gradient.unsafeGetTensorImpl()->bump_version();
  }
  if (stretch.copy_out.defined()) stretch.copy_out.unsafeGetTensorImpl()->bump_version();
  for (const at::Tensor& state : stretch.states) state.unsafeGetTensorImpl()->bump_version();
}

// Stretches one after the other, as if they were one; of a single one nothing is on the heap.
struct Flats {
  c10::SmallVector<FlatStretch, 1> stretches;
  c10::SmallVector<int64_t, 1> ends;  // of each, in elements from the first one's beginning

  int64_t numel() const { return ends.empty() ? 0 : ends.back(); }
};

Flats flats_of(std::span<const Stretch> stretches, const GradientFactors& factors) {
  Flats flats;
  flats.stretches.reserve(stretches.size());
  flats.ends.reserve(stretches.size());
  for (const Stretch& stretch : stretches) {
    flats.stretches.push_back(flat_of(stretch, factors));
    flats.ends.push_back(flats.numel() + stretch.values.numel());
  }
  return flats;
}

// Elements [begin, end) of all of them.
void step_on_cpu(const UpdateRule& rule, const Flats& flats, int64_t begin, int64_t end) {
  auto i = static_cast<size_t>(std::upper_bound(flats.ends.begin(), flats.ends.end(), begin) -
                               flats.ends.begin());
  while (begin < end) {
    const FlatStretch& flat = flats.stretches[i];
    const int64_t first = flats.ends[i] - flat.numel;
    const int64_t until = std::min(end, flats.ends[i]);
    cpu::fused_step(rule, flat, begin - first, until - first);
    begin = until;
    ++i;
  }
}

}  // namespace

std::vector<at::Tensor> make_states(size_t count, double initial, const at::Tensor& values) {
  check_flat({"make_states", "values"}, values);
  std::vector<at::Tensor> states;
  for (size_t i = 0; i < count; ++i) {
    states.push_back(at::full({values.numel()}, initial, values.options().dtype(at::kFloat)));
  }
  return states;
}

void fused_step(const UpdateRule& rule, std::span<const Stretch> stretches,
                const GradientFactors& factors) {
  for (const Stretch& stretch : stretches) {
    check(rule, stretch, factors);
    check_one_device(stretch, stretches.front());
  }
  if (stretches.empty() || stretches.front().values.is_meta()) return;
  const at::Device device = stretches.front().values.device();
  const Flats flats = flats_of(stretches, factors);
  if (device.is_cpu()) {
    parallel_for(flats.numel(), kNumelPerThread,
                 [&](int64_t begin, int64_t end) { step_on_cpu(rule, flats, begin, end); });
  } else {
    const c10::DeviceGuard guard(device);
    for (const FlatStretch& flat : flats.stretches) {
      cuda::fused_step(rule, flat, current_stream(device));
    }
  }
  for (const Stretch& stretch : stretches) bump_versions(stretch, factors);
}

}  // namespace zeropage::offload::detail
