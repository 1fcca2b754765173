// Sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
// 2022): the ranks that share a layer's slices also share the tokens of what lies between a row and the next
// column, such as norms, dropouts and the residual stream. So each computes and keeps a slice of that.
//
//   parallel::LinearOptions to_hidden(d, 4 * d), from_hidden(4 * d, d);
//   to_hidden.sequence_dim = from_hidden.sequence_dim = 1;     // of [batch, sequence, features]
//   x = parallel::split_sequence(embedded, 1, world);          // this rank's tokens
//   x = x + down(torch::gelu(up(norm(x))));                    // norm: a SequenceParallelLayerNorm
//   y = parallel::gather_sequence(x, 1, world);                // all tokens, on all ranks
//
// A sequence is cut into equal slices, so the ranks must divide its length.
//
// Parameters that each rank uses on its own tokens get a part of their gradient there. The layers here add the
// parts up in backward, so that a wrapper, a norm and an optimizer see the same whole gradient on all ranks.
// A layer of your own takes such parameters through copy_to_ranks() (parallel/rank_functions.h).
// A dropout on slices draws under a RandomOfRank (parallel/random_of_rank.h).
//
// Collective: forward and backward, in the same order on all ranks.
// Errors: as parallel/rank_operators.h; a length that the ranks do not divide is refused on all of them.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include "comm/world.h"
#include "parallel/ranks.h"

namespace zeropage::parallel {

// This rank's slice of dimension `dim` of a tensor that all ranks hold alike; its gradient is gathered.
at::Tensor split_sequence(const at::Tensor& whole, int64_t dim, const comm::World& world);
// The whole of the ranks' slices, for what all ranks then compute alike: the gradient is this rank's slice.
at::Tensor gather_sequence(const at::Tensor& slice, int64_t dim, const comm::World& world);

// torch::nn::LayerNorm over the features of this rank's tokens. Its parameters are whole, and the same on
// all ranks. Backward adds up their gradients by one all-reduce.
class SequenceParallelLayerNormImpl : public torch::nn::Cloneable<SequenceParallelLayerNormImpl> {
 public:
  SequenceParallelLayerNormImpl(const torch::nn::LayerNormOptions& options,
                                const comm::World& world);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& slice);
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor weight;  // undefined unless elementwise_affine
  torch::Tensor bias;    // likewise

 private:
  std::string name() const;
  torch::nn::LayerNormOptions options_;
  RanksPointer ranks_;
};
TORCH_MODULE(SequenceParallelLayerNorm);

}  // namespace zeropage::parallel
