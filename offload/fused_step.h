// One step of AdamW, Adam, SGD, Adagrad or Lion over a flat stretch of parameters in one pass over
// memory: the gradient converted and scaled, the states and values updated, and the values copied
// out in a lower precision. fp32 results have the same bits on the CPU and on CUDA, for any number
// of threads and any split of the stretch, and are within a few ulp of torch::optim's.
//
//   auto states = offload::make_states(options, values);
//   offload::fused_step(options, step, {values, gradient, {}, states}, {.scale = 1.0 / 65536});
//
// On CUDA the step is queued on the device's current stream; tensors must live until it ran, as
// for any LibTorch operator. On the meta device the arguments are checked and nothing is done.
// Threads: any; the CPU's step uses LibTorch's intra-op threads. A process that flushes denormals
// to zero has other bits.
// Throws c10::Error in words when an option is out of range or a tensor is not as described.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/rules_of_options.h"

namespace zeropage::offload {

// What one step updates: flat, contiguous, same numel, one device, no overlap.
struct Stretch {
  at::Tensor values;    // [numel] fp32: the parameter's, or its master weights
  at::Tensor gradient;  // [numel] fp32, bf16 or fp16
  // [numel] bf16 or fp16: takes over the new values, to nearest even; undefined: none.
  at::Tensor copy_out;
  std::vector<at::Tensor> states;  // [numel] fp32 each, as made by make_states
};

// What becomes of the gradient when it was read.
enum class GradientAfter : uint8_t {
  kKept,
  // Zero, also where found_inf keeps all else: what zero_grad(false) would do in a pass of its own.
  // Costs the writing of the gradient, and no reading.
  kZeroed,
};

struct GradientFactors {
  // The gradient is multiplied by it, in fp32, first of all: 1 / loss scale times the factor of
  // clipping. Default: 1.
  double scale = 1;
  // [1] fp32 on the stretch's device. If it is not 0 when the step runs, values, states and copies
  // stay as they are. Undefined: the step is always made.
  at::Tensor found_inf;
  GradientAfter after = GradientAfter::kKept;
};

// Options that have a fused step.
template <typename Options>
concept HasFusedStep = requires(const Options& options) {
  { rule_of(options, int64_t{1}) } -> std::same_as<UpdateRule>;
};

namespace detail {
std::vector<at::Tensor> make_states(size_t count, double initial, const at::Tensor& values);
void fused_step(const UpdateRule& rule, std::span<const Stretch> stretches,
                const GradientFactors& factors);
}  // namespace detail

// State for that many values, in the order of state_names(options); 4 bytes an element each, of
// the calling thread's memory kind.
template <HasFusedStep Options>
std::vector<at::Tensor> make_states(const Options& options, const at::Tensor& values) {
  return detail::make_states(state_names(options).size(), initial_state(options), values);
}

// step: counted from 1.
template <HasFusedStep Options>
void fused_step(const Options& options, int64_t step, const Stretch& stretch,
                const GradientFactors& factors = {}) {
  detail::fused_step(rule_of(options, step), {&stretch, 1}, factors);
}

// The same of many stretches of one device, with the bits of single calls: all are checked before
// any is changed, and the threads of the CPU share the elements, however few each stretch has. For
// the tensors of a module as they are: of 1,000 elements each, single calls take most of their time
// to begin. On CUDA every stretch is a kernel. Costs the host 100 bytes a stretch during the call.
template <HasFusedStep Options>
void fused_step(const Options& options, int64_t step, std::span<const Stretch> stretches,
                const GradientFactors& factors = {}) {
  detail::fused_step(rule_of(options, step), stretches, factors);
}

}  // namespace zeropage::offload
