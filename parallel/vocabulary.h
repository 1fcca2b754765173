// An embedding and a cross entropy whose vocabulary is cut over ranks (Shoeybi et al., "Megatron-LM", 2019).
//
//   parallel::VocabularyParallelEmbedding tokens(257, d, world);      // two ranks: 128 and 129 rows
//   parallel::ColumnParallelLinear head(parallel::LinearOptions(d, 257), world);
//   auto loss = parallel::vocabulary_parallel_cross_entropy(head(hidden), targets, 257, world);
//
// The logits of a batch are often the largest tensor of a step: here each rank has its slice of them, and no
// rank has the whole.
//
// Sent: the embedding all-reduces its output. The cross entropy all-reduces three numbers a target in
// forward, and nothing in backward.
// Collective: construction, forward and backward, as parallel/linear.h.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include "comm/world.h"
#include "parallel/ranks.h"
#include "parallel/sliced_layer.h"
#include "parallel/slices.h"

namespace zeropage::parallel {

// The rows of the ids that this rank has, from `slice` [rows of this rank, width], and zeros for others; summed
// over ranks. ids: whole numbers of any sizes. name: for errors. sequence_dim: as below.
at::Tensor embedding_over_ranks(const at::Tensor& slice, const at::Tensor& ids,
                                const Slices& slices, const RanksPointer& ranks,
                                const std::string& name,
                                std::optional<int64_t> sequence_dim = std::nullopt);

// ids of any sizes -> [..., embedding_dim]. Values as torch::nn::Embedding draws them.
// sequence_dim: of the sequence in the ids; the output is then of this rank's tokens (parallel/sequence.h).
class VocabularyParallelEmbeddingImpl
    : public torch::nn::Cloneable<VocabularyParallelEmbeddingImpl>,
      public SlicedLayer {
 public:
  VocabularyParallelEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim,
                                  const comm::World& world,
                                  std::optional<int64_t> sequence_dim = std::nullopt);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& ids);
  void pretty_print(std::ostream& stream) const override;
  std::vector<SlicedParameter> sliced_parameters() const override {
    return {{weight, SlicedDimension(slices())}};
  }
  const comm::World& ranks_of_slices() const override { return ranks_->world; }

  torch::Tensor weight;  // [this rank's slice of num_embeddings, embedding_dim]

 private:
  std::string name() const;
  Slices slices() const;
  int64_t num_embeddings_;
  int64_t embedding_dim_;
  RanksPointer ranks_;
  std::optional<int64_t> sequence_dim_;
};
TORCH_MODULE(VocabularyParallelEmbedding);

// The mean of torch::cross_entropy over the targets that are not `ignore_index`; NaN without any, as there.
// logits: [..., this rank's slice of `vocabulary` classes]. targets: [...], classes of the whole vocabulary,
// the same on all ranks. Computed in fp32, or in the logits' precision if that is higher.
// Saved for backward: a tensor of the slice's size.
// Throws if the slice is not this rank's, and on targets that are no class.
at::Tensor vocabulary_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                             int64_t vocabulary, const comm::World& world,
                                             int64_t ignore_index = -100);

}  // namespace zeropage::parallel
