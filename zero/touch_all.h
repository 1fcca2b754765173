// A part of a forward among pages that stay: what touch_all() and tiled() are made of.
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>

namespace zeropage::zero {

// What runs there.
enum class Within : uint8_t {
  kAnything,  // other operators on each rank, which a Recompute around it would repeat
  kRegions,  // checkpointed regions, which repeat themselves, and the same operators between them on all ranks
};

// What touch_all() does (zeropage/touch_all.h), which says what it costs and throws. who: for errors.
at::Tensor run_among_pages(const char* who, const torch::nn::Module& modules,
                           const at::Tensor& input,
                           const std::function<at::Tensor(const at::Tensor&)>& run, Within within);

}  // namespace zeropage::zero
