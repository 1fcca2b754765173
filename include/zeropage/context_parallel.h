// Attention over sequences that are split over ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "zeropage/world.h"

// Ranks along a mesh's axis "context" have the same samples, and each has some of their tokens. Everything in a
// transformer but attention works at a token alone, so activations take 1 / ranks of their memory; attention runs over all
// ranks' keys and values:
//
//   zeropage::Mesh mesh(world, {{"data", 2}, {"context", 4}});
//   zeropage::DistributedDataParallel model(Gpt(config), mesh, options);      // sharded over data x context
//   ...
//   tokens = parallel::split_context(batch.data, 1, mesh["context"]);         // [batch, length / 4]
//   targets = parallel::split_context(batch.target, 1, mesh["context"]);      // shifted before they are split
//   positions = parallel::context_positions(length, mesh["context"]);         // for embeddings and rotary tables
//   ...
//
// In the module attention stays what it is, if it is marked before it is wrapped:
//
//   parallel::context_parallel(gpt, mesh["context"]);
//
// or it calls it by name:
//
//   y = parallel::context_attention(q, k, v, mesh["context"], {.is_causal = true});
//
// The loss is each rank's mean over its tokens, and gradients are averaged over data x context, so no factor appears
// anywhere. Where ranks count different numbers of tokens (padding, ignored targets), Accumulator::backward(loss, tokens)
// weighs them. Samplers go by mesh["data"], since ranks along "context" read the same samples.
//
// Order: a sequence of length T over P ranks is cut into 2 P chunks, and rank r has chunks r and 2 P - 1 - r. So all
// ranks have as much to compute under a causal mask (the zig-zag order of Brandon et al., "Striped Attention", 2023, and of
// Llama 3's training).
//
// Attention that a module writes out by hand, as softmax(q k^T) v, sees this rank's tokens alone. Where all of a marked
// module's attention is of that kind its forward throws; beside scaled_dot_product_attention it is not noticed.

namespace zeropage::operators {
class ReplacementScope;
}  // namespace zeropage::operators

namespace zeropage::parallel {

enum class ContextForm : uint8_t {
  // Blocks of keys and values travel around the ranks while each computes with the block that it has (Liu et al., "Ring
  // Attention", 2023). A rank sends (P - 1) blocks in forward, and as many and P blocks of their gradients in backward.
  kRing,
  // Each rank gets the whole sequence for H / P of the heads, by all-to-all, and sends its output back (Jacobs et al.,
  // "DeepSpeed Ulysses", 2023). H must be a multiple of P. Key heads that P does not divide are repeated.
  kUlysses,
};

struct ContextAttentionOptions {
  // A token attends to those before it in the whole sequence, and to itself.
  bool is_causal = false;
  // What products of queries and keys are multiplied by; default 1 / sqrt(head size).
  std::optional<double> scale = {};
  ContextForm form = ContextForm::kRing;
  // Packed sequences: the document of each of this rank's tokens, [batch, length / P], integers. A token attends to those of
  // its own document alone. Undefined: one document. Then blocks are computed by matrix products with a mask.
  at::Tensor documents = {};
};

// Marks a module, whose scaled_dot_product_attention runs as context_attention() from then on, wherever it calls it, in
// forwards of the DistributedDataParallel that wraps it over a mesh with that axis: nothing in the module changes. Before
// wrapping; on the module that is wrapped, and on no module within it.
// In such a forward attention with a mask, with dropout of its weights, or to other tokens than the queries' is refused, and so is a
// forward without any scaled_dot_product_attention.
// Throws where the module has a torch::nn::MultiheadAttention, or a module within it is marked. Not collective.
void context_parallel(torch::nn::Module& module, const comm::World& context,
                      ContextForm form = ContextForm::kRing);
template <typename M>
void context_parallel(const torch::nn::ModuleHolder<M>& module, const comm::World& context,
                      ContextForm form = ContextForm::kRing) {
  context_parallel(*module.ptr(), context, form);
}

// While it lives, the calling thread's forwards of a marked module that nothing wraps are as in its wrapper's.
class ContextScope {
 public:
  // Throws where the module is not marked.
  explicit ContextScope(const torch::nn::Module& module);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  std::unique_ptr<operators::ReplacementScope> scope_;
};

// softmax(scale q k^T) v over all ranks' keys and values.
//
// query: [batch, heads, length / P, head size]; key, value: the same, or with a number of heads that divides `heads`. In
// fp64, fp32, bf16 or fp16, all alike; under autocast in its dtype. Returns [batch, heads, length / P, head size] in that dtype.
// Blocks are merged in fp32, or in fp64 of fp64. Without dropout.
//
// Collective over `context`, in forward and in backward; may be repeated in a checkpointed region, and a Recompute keeps its
// result. On CUDA blocks are computed by matrix products, in tiles of 256 queries.
// Errors: sizes that do not fit together, sizes or options that differ between ranks, heads that Ulysses' ranks do not divide,
// dtypes that differ, a backward that is to be differentiated itself.
at::Tensor context_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const comm::World& context,
                             const ContextAttentionOptions& options = {});

// This rank's part of dimension `dim` of a batch that all ranks of `context` have: a copy of chunks r and 2 P - 1 - r.
// Throws unless its length is a multiple of 2 P. Not collective; gradients go to this rank's part. Ranks must split the same wholes in
// the same order: attention compares a hash of the last one on the host.
at::Tensor split_context(const at::Tensor& whole, int64_t dim, const comm::World& context);

// The positions in the whole sequence of this rank's tokens: [length / P], int64, ascending.
at::Tensor context_positions(int64_t length, const comm::World& context,
                             c10::Device device = c10::kCPU);

// The whole of what split_context() split, on every rank, for evaluation. Without a gradient. Collective.
at::Tensor gather_context(const at::Tensor& part, int64_t dim, const comm::World& context);

}  // namespace zeropage::parallel
