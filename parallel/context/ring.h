// Attention whose blocks of keys and values travel around the ranks, and its gradients.
#pragma once

#include <string>

#include <ATen/core/TensorBody.h>

#include "parallel/context/blocks.h"
#include "zeropage/world.h"

namespace zeropage::parallel::context {

// What a rank does whose stamp (parallel/stamp.h) is another, and what to do.
inline constexpr const char* kOtherAttention =
    "has other sizes, another dtype or scale, is causal or packed where this rank is not, or gave "
    "split_context() another batch; ranks along the axis must call it alike on parts of the same "
    "samples, so let samplers go by mesh[\"data\"]";

struct RingOptions {
  double scale = 1;
  bool is_causal = false;
  at::Tensor documents;  // of all ranks: [ranks, batch, length], int64; undefined: one document
};

// query, key, value, output: this rank's. name: for errors. Collective.
Attended ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const RingOptions& options, const comm::World& world,
                        const std::string& name);
AttentionGradients ring_attention_backward(const at::Tensor& gradient, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const Attended& whole, const RingOptions& options,
                                           const comm::World& world, const std::string& name);

}  // namespace zeropage::parallel::context
