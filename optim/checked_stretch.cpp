#include "optim/checked_stretch.h"

#include "optim/flat_tensor.h"
#include "optim/packed_tensors.h"
#include "zeropage/check.h"

namespace zeropage::optim {
namespace {

constexpr uintptr_t kLineBytes = 64;

void check_values_and_gradient(const Stretch& stretch) {
  const at::Tensor& values = stretch.values;
  check_flat({kFusedStep, "values"}, values);
  if (!stretch.remainders.defined()) check_fp32({kFusedStep, "values"}, values);
  check_alike({kFusedStep, "gradient"}, stretch.gradient, values);
  precision_of({kFusedStep, "gradient"}, stretch.gradient);
}

void check_copy_out(const Stretch& stretch) {
  if (stretch.copy_out.defined()) {
    check_alike({kFusedStep, "copy_out"}, stretch.copy_out, stretch.values);
    const at::ScalarType dtype = stretch.copy_out.scalar_type();
    ZP_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf, kFusedStep,
             ": copy_out: expected bf16 or fp16, got ", dtype,
             "; leave it undefined where the parameters themselves are fp32");
  }
  ZP_CHECK(
      !stretch.adopts_copy || stretch.copy_out.defined(), kFusedStep,
      ": adopts_copy: expected a copy_out to adopt from, got none; set one, or leave it false");
}

template <typename Visit>
void visit_tensors(const Stretch& stretch, const Visit& visit) {
  visit(stretch.values);
  visit(stretch.gradient);
  if (stretch.copy_out.defined()) visit(stretch.copy_out);
  for (const at::Tensor& state : stretch.states) visit(state);
}

void prefetch(const void* object, uintptr_t size_bytes) {
  const auto* const bytes = static_cast<const char*>(object);
  for (uintptr_t i = 0; i < size_bytes; i += kLineBytes) __builtin_prefetch(bytes + i);
}

}  // namespace

void check_as_many(const Stretch& stretch, size_t states) {
  ZP_CHECK(stretch.states.size() == states, kFusedStep, ": states: expected ", states,
           " with these options, got ", stretch.states.size(),
           "; make them with make_states(options, values)");
}

void check_stretch(const Stretch& stretch, size_t states) {
  check_values_and_gradient(stretch);
  check_as_many(stretch, states);
  const StateFormat format = format_of(stretch);
  for (const at::Tensor& state : stretch.states) {
    check_alike({kFusedStep, "a state"}, state, stretch.values);
    ZP_CHECK(state.scalar_type() == stretch.states.front().scalar_type(), kFusedStep,
             ": a state: expected ", stretch.states.front().scalar_type(),
             " as the first one, got ", state.scalar_type(), "; make all of them in one format");
  }
  check_packed(stretch, format);
  check_copy_out(stretch);
}

void check_whole(const Stretch& stretch, size_t states, int64_t numel, int64_t state_numel) {
  check_values_and_gradient(stretch);
  check_as_many(stretch, states);
  check_copy_out(stretch);
  ZP_CHECK(
      !is_packed(stretch), kFusedStep,
      ": pieces: expected whole values and fp32 states, got smaller ones; step each by itself");
  const at::Tensor& values = stretch.values;
  ZP_CHECK(values.numel() >= numel, kFusedStep, ": pieces: expected them within the ",
           values.numel(), " elements of values, got one that ends at ", numel);
  for (const at::Tensor& state : stretch.states) {
    check_flat({kFusedStep, "a state"}, state);
    check_fp32({kFusedStep, "a state"}, state);
    ZP_CHECK(state.numel() >= state_numel && state.device() == values.device(), kFusedStep,
             ": a state: expected ", state_numel, " elements or more on ", values.device(),
             ", as the pieces have, got ", state.numel(), " on ", state.device());
  }
}

void check_found_inf(const GradientFactors& factors, const at::Device& device) {
  const at::Tensor& flag = factors.found_inf;
  if (!flag.defined()) return;
  ZP_CHECK(flag.numel() == 1 && flag.scalar_type() == at::kFloat && flag.device() == device,
           kFusedStep, ": found_inf: expected one fp32 number on ", device, ", got ",
           flag.scalar_type(), " of sizes ", flag.sizes(), " on ", flag.device(),
           "; offload::found_inf(gradient) makes it");
}

void check_one_device(const Stretch& stretch, const Stretch& first) {
  ZP_CHECK(stretch.values.device() == first.values.device(), kFusedStep,
           ": stretches: expected all on ", first.values.device(),
           ", where the first is, got one on ", stretch.values.device(),
           "; make a call for each device");
}

FlatStretch flat_of(const Stretch& stretch) {
  FlatStretch flat;
  if (!stretch.remainders.defined()) flat.values = stretch.values.mutable_data_ptr<float>();
  flat.gradient_precision = precision_of({kFusedStep, "gradient"}, stretch.gradient);
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
  return flat;
}

FlatStretch with_factors(FlatStretch flat, const GradientFactors& factors) {
  flat.gradient_scale = static_cast<float>(factors.scale);
  if (factors.found_inf.defined()) flat.found_inf = factors.found_inf.const_data_ptr<float>();
  if (factors.after == GradientAfter::kZeroed) {
    flat.gradient_to_zero = const_cast<void*>(flat.gradient);
  }
  return flat;
}

FlatStretch flat_of(const Stretch& stretch, const GradientFactors& factors) {
  // What will be written to has memory of its own from here on.
  if (factors.after == GradientAfter::kZeroed) stretch.gradient.mutable_data_ptr();
  return with_factors(flat_of(stretch), factors);
}

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

}  // namespace zeropage::optim
