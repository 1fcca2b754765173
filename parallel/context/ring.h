// Attention whose blocks of keys and values travel around the ranks, and its gradients.
#pragma once

#include <string>

#include <ATen/core/TensorBody.h>

#include "parallel/context/blocks.h"
#include "zeropage/world.h"

namespace zeropage::parallel::context {

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
