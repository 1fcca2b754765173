#include "offload/fused_step.h"

#include <algorithm>
#include <variant>

#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>

#include "memory/check.h"
#include "offload/cpu/fused_step.h"
#include "offload/cpu/packed_step.h"
#include "offload/cuda/current_stream.h"
#include "offload/cuda/fused_step.h"
#include "offload/cuda/packed_step.h"
#include "offload/flat_tensor.h"
#include "offload/packed_tensors.h"
#include "offload/parallel.h"

namespace zeropage::offload::detail {
namespace {

// The least that is worth a thread of its own.
constexpr int64_t kStepNumelPerThread = 32768;

size_t states_of(const UpdateRule& rule) {
  return std::visit(
      []<typename Rule>(const Rule& /*rule*/) { return static_cast<size_t>(Rule::kStates); }, rule);
}

void check(const UpdateRule& rule, const Stretch& stretch, const GradientFactors& factors) {
  const at::Tensor& values = stretch.values;
  check_flat({kFusedStep, "values"}, values);
  if (!stretch.remainders.defined()) check_fp32({kFusedStep, "values"}, values);
  check_alike({kFusedStep, "gradient"}, stretch.gradient, values);
  precision_of({kFusedStep, "gradient"}, stretch.gradient);
  const size_t expected = states_of(rule);
  ZP_CHECK(stretch.states.size() == expected, kFusedStep, ": states: expected ", expected,
           " with these options, got ", stretch.states.size(),
           "; make them with make_states(options, values)");
  const StateFormat format = format_of(stretch);
  for (const at::Tensor& state : stretch.states) {
    check_alike({kFusedStep, "a state"}, state, values);
    ZP_CHECK(state.scalar_type() == stretch.states.front().scalar_type(), kFusedStep,
             ": a state: expected ", stretch.states.front().scalar_type(),
             " as the first one, got ", state.scalar_type(), "; make all of them in one format");
  }
  check_packed(stretch, format);
  if (stretch.copy_out.defined()) {
    check_alike({kFusedStep, "copy_out"}, stretch.copy_out, values);
    const at::ScalarType dtype = stretch.copy_out.scalar_type();
    ZP_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf, kFusedStep,
             ": copy_out: expected bf16 or fp16, got ", dtype,
             "; leave it undefined where the parameters themselves are fp32");
  }
  ZP_CHECK(
      !stretch.adopts_copy || stretch.copy_out.defined(), kFusedStep,
      ": adopts_copy: expected a copy_out to adopt from, got none; set one, or leave it false");
  const at::Tensor& flag = factors.found_inf;
  if (flag.defined()) {
    ZP_CHECK(
        flag.numel() == 1 && flag.scalar_type() == at::kFloat && flag.device() == values.device(),
        kFusedStep, ": found_inf: expected one fp32 number on ", values.device(), ", got ",
        flag.scalar_type(), " of sizes ", flag.sizes(), " on ", flag.device(),
        "; offload::found_inf(gradient) makes it");
  }
}

void check_one_device(const Stretch& stretch, const Stretch& first) {
  ZP_CHECK(stretch.values.device() == first.values.device(), kFusedStep,
           ": stretches: expected all on ", first.values.device(),
           ", where the first is, got one on ", stretch.values.device(),
           "; make a call for each device");
}

FlatStretch flat_of(const Stretch& stretch, const GradientFactors& factors) {
  FlatStretch flat;
  if (!stretch.remainders.defined()) flat.values = stretch.values.mutable_data_ptr<float>();
  flat.gradient_precision = precision_of({kFusedStep, "gradient"}, stretch.gradient);
  if (factors.after == GradientAfter::kZeroed) {
    flat.gradient_to_zero = stretch.gradient.mutable_data_ptr();
  }
  flat.gradient = stretch.gradient.const_data_ptr();
  if (stretch.copy_out.defined()) {
    flat.copy_out = stretch.copy_out.mutable_data_ptr();
    flat.copy_precision = precision_of({kFusedStep, "copy_out"}, stretch.copy_out);
    flat.adopts_copy = stretch.adopts_copy;
  }
  for (size_t i = 0; i < stretch.states.size() && !is_packed(stretch); ++i) {
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
  for (const auto* tensors : {&stretch.states, &stretch.scales}) {
    for (const at::Tensor& tensor : *tensors) tensor.unsafeGetTensorImpl()->bump_version();
  }
  if (stretch.remainders.defined()) stretch.remainders.unsafeGetTensorImpl()->bump_version();
}

void step_packed(const UpdateRule& rule, const PackedStretch& stretch, const at::Device& device) {
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    return cuda::packed_step(rule, stretch, cuda::current_stream(device));
  }
  // Threads share no block.
  const int64_t blocks = blocks_of(stretch.first_in_block, stretch.flat.numel);
  parallel_for(blocks, kStepNumelPerThread / kStateBlockNumel, [&](int64_t begin, int64_t end) {
    const auto element = [&](int64_t block) {
      return std::clamp(block * kStateBlockNumel - stretch.first_in_block, int64_t{0},
                        stretch.flat.numel);
    };
    cpu::packed_step(rule, stretch, element(begin), element(end));
  });
}

at::ScalarType dtype_of(StateFormat format) {
  switch (format) {
    case StateFormat::kFp32:
      return at::kFloat;
    case StateFormat::kBf16:
      return at::kBFloat16;
    case StateFormat::k8Bit:
      break;
  }
  return at::kByte;
}

// Stretches one after the other, as if they were one; of a single one nothing is on the heap.
struct Flats {
  c10::SmallVector<FlatStretch, 1> stretches;
  c10::SmallVector<int64_t, 1> ends;  // of each, in elements from the first one's beginning

  int64_t numel() const { return ends.back(); }
};

template <typename Visit>
void visit_tensors(const Stretch& stretch, const Visit& visit) {
  visit(stretch.values);
  visit(stretch.gradient);
  if (stretch.copy_out.defined()) visit(stretch.copy_out);
  for (const at::Tensor& state : stretch.states) visit(state);
}

constexpr uintptr_t kLineBytes = 64;

void prefetch(const void* object, uintptr_t size_bytes) {
  const auto* const bytes = static_cast<const char*>(object);
  for (uintptr_t i = 0; i < size_bytes; i += kLineBytes) __builtin_prefetch(bytes + i);
}

// What a tensor is lies in three places of the heap, and that of many tensors in no cache: fetched
// together, they take little longer than one.
void prefetch_tensors(std::span<const Stretch> stretches) {
  for (const Stretch& stretch : stretches) prefetch(stretch.states.data(), kLineBytes);
  for (const Stretch& stretch : stretches) {
    visit_tensors(stretch, [](const at::Tensor& tensor) {
      prefetch(tensor.unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
    });
  }
  for (const Stretch& stretch : stretches) {
    visit_tensors(stretch, [](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      prefetch(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(),
               sizeof(c10::StorageImpl));
    });
  }
}

// visit(i) for each, by several threads.
template <typename Visit>
void for_each_stretch(std::span<const Stretch> stretches, const Visit& visit) {
  constexpr int64_t kStretchesPerThread = 256;
  constexpr size_t kBatch = 16;
  parallel_for(static_cast<int64_t>(stretches.size()), kStretchesPerThread,
               [&](int64_t begin, int64_t end) {
                 const auto last = static_cast<size_t>(end);
                 for (auto i = static_cast<size_t>(begin); i < last; i += kBatch) {
                   const size_t until = std::min(i + kBatch, last);
                   if (stretches.size() > 1) prefetch_tensors(stretches.subspan(i, until - i));
                   for (size_t k = i; k < until; ++k) visit(k);
                 }
               });
}

// All checked, before any is changed.
Flats flats_of(const UpdateRule& rule, std::span<const Stretch> stretches,
               const GradientFactors& factors) {
  Flats flats;
  flats.stretches.resize(stretches.size());
  flats.ends.resize(stretches.size());
  for_each_stretch(stretches, [&](size_t i) {
    check(rule, stretches[i], factors);
    check_one_device(stretches[i], stretches.front());
    // Packed ones take a way of their own, and no elements here.
    if (stretches[i].values.is_meta() || is_packed(stretches[i])) return;
    flats.stretches[i] = flat_of(stretches[i], factors);
  });
  int64_t numel = 0;
  for (size_t i = 0; i < stretches.size(); ++i) flats.ends[i] = numel += flats.stretches[i].numel;
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

std::vector<at::Tensor> make_states(const UpdateRule& rule, double initial,
                                    const at::Tensor& values, StateFormat format) {
  check_flat({"make_states", "values"}, values);
  std::vector<at::Tensor> states;
  for (size_t i = 0; i < states_of(rule); ++i) {
    const double element = format != StateFormat::k8Bit ? initial
                           : initial == 0               ? 0
                                                        : kTopCode<StateSign::kUnsigned>;
    states.push_back(at::full({values.numel()}, element, values.options().dtype(dtype_of(format))));
  }
  return states;
}

std::vector<at::Tensor> make_scales(const UpdateRule& rule, double initial,
                                    const at::Tensor& values, int64_t first_in_block) {
  check_flat({"make_scales", "values"}, values);
  std::vector<at::Tensor> scales;
  for (size_t i = 0; i < states_of(rule); ++i) {
    scales.push_back(at::full({blocks_of(first_in_block, values.numel())}, initial,
                              values.options().dtype(at::kFloat)));
  }
  return scales;
}

void fused_step(const UpdateRule& rule, int64_t step, std::span<const Stretch> stretches,
                const GradientFactors& factors) {
  if (stretches.empty()) return;
  const Flats flats = flats_of(rule, stretches, factors);
  const at::Device device = stretches.front().values.device();
  if (device.is_meta()) return;
  for (const Stretch& stretch : stretches) {
    if (!is_packed(stretch) || stretch.values.numel() == 0) continue;
    step_packed(rule, packed_of(stretch, flat_of(stretch, factors), step), device);
  }
  if (device.is_cpu()) {
    parallel_for(flats.numel(), kStepNumelPerThread,
                 [&](int64_t begin, int64_t end) { step_on_cpu(rule, flats, begin, end); });
  } else {
    const c10::DeviceGuard guard(device);
    for (const FlatStretch& flat : flats.stretches) {
      cuda::fused_step(rule, flat, cuda::current_stream(device));
    }
  }
  for_each_stretch(stretches, [&](size_t i) { bump_versions(stretches[i], factors); });
}

}  // namespace zeropage::offload::detail
