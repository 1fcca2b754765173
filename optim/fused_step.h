// One step of AdamW, Adam, SGD, Adagrad or Lion over a flat stretch of parameters in one pass over
// memory: the gradient converted and scaled, the states and values updated, and the values copied
// out in a lower precision. fp32 results have the same bits on the CPU and on CUDA, for any number
// of threads and any split of the stretch, and are within a few ulp of torch::optim's.
//
//   auto states = offload::make_states(options, values);
//   offload::fused_step(options, step, {values, gradient, {}, states}, {.scale = 1.0 / 65536});
//
// States may be smaller than fp32 (state_format.h), and values may be split into bf16 and what
// remains of them (split_value.h). Their bits are the same on both devices too.
//
// On CUDA the step is queued on the device's current stream; tensors must live until it ran, as
// for any LibTorch operator. On the meta device the arguments are checked and nothing is done.
// Threads: any; the CPU's step uses LibTorch's intra-op threads. A process that flushes denormals
// to zero has other bits.
// Throws c10::Error when an option is out of range or a tensor is not as described.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/rules_of_options.h"
#include "optim/stretch.h"
#include "zeropage/detail/state_format.h"

namespace zeropage::optim {

// Options that have a fused step.
template <typename Options>
concept HasFusedStep = requires(const Options& options) {
  { rule_of(options, int64_t{1}) } -> std::same_as<UpdateRule>;
};

// Those whose step is the first of two passes: it writes directions in place of the values (optim/tensor_form.h).
template <typename Options>
concept HasTwoPasses = requires(const Options& options) {
  { descent_of(options) } -> std::same_as<UpdateRule>;
};

namespace detail {
std::vector<at::Tensor> make_states(const UpdateRule& rule, double initial,
                                    const at::Tensor& values, StateFormat format);
std::vector<at::Tensor> make_scales(const UpdateRule& rule, double initial,
                                    const at::Tensor& values, int64_t first_in_block);
void fused_step(const UpdateRule& rule, int64_t step, std::span<const Stretch> stretches,
                const GradientFactors& factors);
}  // namespace detail

// State for that many values, in the order of state_names(options); state_bytes() each, of
// the calling thread's memory kind. Throws std::invalid_argument, for values of the CPU, where
// ZEROPAGE_CPU_CAPABILITY names instructions that the processor does not have.
template <HasFusedStep Options>
std::vector<at::Tensor> make_states(const Options& options, const at::Tensor& values,
                                    StateFormat format = StateFormat::kFp32) {
  return optim::detail::make_states(rule_of(options, 1), initial_state(options), values, format);
}

// The scales of 8-bit states of a stretch; first_in_block: of its place.
template <HasFusedStep Options>
std::vector<at::Tensor> make_scales(const Options& options, const at::Tensor& values,
                                    int64_t first_in_block) {
  return optim::detail::make_scales(rule_of(options, 1), initial_state(options), values,
                                    first_in_block);
}

// step: counted from 1.
template <HasFusedStep Options>
void fused_step(const Options& options, int64_t step, const Stretch& stretch,
                const GradientFactors& factors = {}) {
  optim::detail::fused_step(rule_of(options, step), step, {&stretch, 1}, factors);
}

// The same of many stretches of one device, with the bits of single calls: all are checked before
// any is changed, and the threads of the CPU share the elements, however few each stretch has. For
// the tensors of a module as they are: of 1,000 elements each, single calls take most of their time
// to begin. Where states are small or values split, every stretch goes by itself; on CUDA 56 others that have the
// same dtypes take one launch. Costs the host 100 bytes a stretch during the call. optim/stretch_list.h has lists
// that are stepped again and again, in one launch however many they are.
template <HasFusedStep Options>
void fused_step(const Options& options, int64_t step, std::span<const Stretch> stretches,
                const GradientFactors& factors = {}) {
  optim::detail::fused_step(rule_of(options, step), step, stretches, factors);
}

}  // namespace zeropage::optim
