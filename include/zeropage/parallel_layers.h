// Layers that are cut by themselves: linear, embedding, norms, sequences; random numbers by rank; `sync_batch_norm()`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include "zeropage/detail/slices.h"
#include "zeropage/world.h"

namespace zeropage::parallel {

// A linear layer whose weight is cut over ranks (Shoeybi et al., "Megatron-LM", 2019).
//
//   parallel::ColumnParallelLinear up(parallel::LinearOptions(d, 4 * d), world);
//   parallel::RowParallelLinear down(parallel::LinearOptions(4 * d, d), world);
//   y = down(torch::gelu(up(x)));       // one all-reduce in forward, and one in backward
//
// Column-parallel: each rank has some of the outputs, so rows of the weight and elements of the bias. Its
// input is whole, its output this rank's slice. Row-parallel: each rank has some of the inputs, so columns
// of the weight; its input is this rank's slice, its output whole, and the bias is whole on every rank.
//
// Attention is cut by heads: a column-parallel layer of 3 parts (queries, keys, values) in units of a head,
// then attention over the heads that this rank has, then a row-parallel layer in the same units.
//
// Each rank draws the whole weight, as torch::nn::Linear does, gets rank 0's, and keeps its slice. So values
// do not depend on the number of ranks, and generators stay alike. The constructor holds the whole weight
// for a moment.
// Collective: construction, forward and backward.
struct LinearOptions {
  LinearOptions(int64_t inputs, int64_t outputs) : in_features(inputs), out_features(outputs) {}
  int64_t in_features;
  int64_t out_features;
  bool bias = true;
  // Stretches of the dimension that is cut, each of which is cut for itself: 3 for queries, keys and values
  // in one layer. Column-parallel layers only.
  int64_t parts = 1;
  // Elements of that dimension that stay on one rank: those of an attention head.
  int64_t unit = 1;
  // Some ranks may get a unit more than others. If slices pass between layers, set it only where units of the same
  // number belong together, as with Cut::uneven() (zeropage/tensor_parallel.h). A whole input or output does not need
  // it.
  bool uneven = false;
  // Column-parallel: gathers the output, which is then whole. Not with parts.
  bool gathers_output = false;
  // Row-parallel: takes a whole input and cuts it. Else it is this rank's slice already.
  bool splits_input = false;
  // The dimension of the sequence, counted from 0, where the tokens outside a column and its row are cut over
  // the same ranks (zeropage/parallel_layers.h). A column takes this rank's tokens and gathers all. A row adds up
  // and returns this rank's. Unset: all ranks have all tokens.
  std::optional<int64_t> sequence_dim = {};
};

// [..., in_features] -> [..., this rank's slice of out_features]
class ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl>,
                                 public SlicedLayer {
 public:
  ColumnParallelLinearImpl(const LinearOptions& options, const comm::World& world);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::vector<SlicedParameter> sliced_parameters() const override;
  const comm::World& ranks_of_slices() const override { return ranks_->world; }

  torch::Tensor weight;  // [slice, in_features]
  torch::Tensor bias;    // [slice]

 private:
  Slices slices() const;
  SlicedDimension cut() const;
  LinearOptions options_;
  RanksPointer ranks_;
};
TORCH_MODULE(ColumnParallelLinear);

// [..., this rank's slice of in_features] -> [..., out_features]
class RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl>,
                              public SlicedLayer {
 public:
  RowParallelLinearImpl(const LinearOptions& options, const comm::World& world);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::vector<SlicedParameter> sliced_parameters() const override;
  const comm::World& ranks_of_slices() const override { return ranks_->world; }

  torch::Tensor weight;  // [out_features, slice]
  torch::Tensor bias;    // [out_features], the same on all ranks

 private:
  Slices slices() const;
  SlicedDimension cut() const;
  LinearOptions options_;
  RanksPointer ranks_;
};
TORCH_MODULE(RowParallelLinear);

// Batch norm over the batches of all ranks, as if they were one batch.
//
//   parallel::SyncBatchNorm norm(torch::nn::BatchNormOptions(64), world);
//
// A module that has torch::nn::BatchNorm1d, 2d or 3d needs no change: sync_batch_norm(module, world)
// (sync_batch_norm(), below) gives their forward to batch_norm_over_ranks().
//
// Batches may differ in size, and a rank's may be empty. In training every forward is a collective, and so
// is its backward where the input requires a gradient: all ranks run the same layers in the same order, and
// the loss of every rank depends on them. In eval mode, and with one rank, it is LibTorch's batch norm.
//
// Bits: all ranks compute the same statistics, in double precision from each rank's; so running statistics
// are the same on all ranks. Inputs of a lower precision are computed in fp32.
// Sent: a gather of 16 bytes a channel and 8 a rank in forward, an all-reduce of 16 bytes a channel in
// backward.
// Memory: what LibTorch's saves; a tensor of the input's size passes in backward.
// Does what torch::batch_norm does in training. input: [batch, channels, ...]; the optional tensors: [channels]. name: for
// errors.
// Throws on all ranks alike where a channel has fewer than two values on all ranks together (on the host: on
// an accelerator the running variance becomes NaN, as nobody waits for the number).
at::Tensor batch_norm_over_ranks(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& bias, const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double momentum, double eps,
                                 const RanksPointer& ranks, const std::string& name);

// A BatchNorm of any number of dimensions whose training batches are those of all ranks. Without tensors
// (neither affine nor running statistics) it works too.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const comm::World& world);

  // input: [batch, channels, ...]
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  RanksPointer ranks_;
};
TORCH_MODULE(SyncBatchNorm);

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
// A layer of your own takes such parameters through copy_to_ranks() (zeropage/parallel_layers.h).
// A dropout on slices draws under a RandomOfRank (zeropage/parallel_layers.h).
//
// Collective: forward and backward, in the same order on all ranks.
// Errors: as parallel/rank_operators.h; a length that the ranks do not divide is refused on all of them.
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
// Collective: construction, forward and backward, as zeropage/parallel_layers.h.
// The rows of the ids that this rank has, from `slice` [rows of this rank, width], and zeros for others; summed
// over ranks. ids: whole numbers of any sizes. name: for errors. sequence_dim: as below.
at::Tensor embedding_over_ranks(const at::Tensor& slice, const at::Tensor& ids,
                                const Slices& slices, const RanksPointer& ranks,
                                const std::string& name,
                                std::optional<int64_t> sequence_dim = std::nullopt);

// ids of any sizes -> [..., embedding_dim]. Values as torch::nn::Embedding draws them.
// sequence_dim: of the sequence in the ids; the output is then of this rank's tokens (zeropage/parallel_layers.h).
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

// The functions under tensor parallelism (Shoeybi et al., "Megatron-LM", 2019) and sequence parallelism
// (Korthikanti et al. 2022): what passes between ranks in forward, and its counterpart in backward.
//
//                        forward                         backward
//   copy_to_ranks        nothing                         sum of the ranks' gradients
//   reduce_from_ranks    sum of the ranks' tensors       nothing
//   split_to_ranks       this rank's slice               gather of the gradients' slices
//   gather_from_ranks    gather of the slices            this rank's slice of the gradient
//   gather_to_ranks      gather of the slices            this rank's slice of the gradients' sum
//   scatter_from_ranks   this rank's slice of the sum    gather of the gradients' slices
//
// The first four take what all ranks hold alike to what each holds a part of, or back. So the gradient of a
// tensor that all ranks hold alike is the same on all ranks, to the bit. The last two are for a tensor of
// which each rank holds a slice on both sides of a layer: gather_to_ranks comes before what each rank
// computes in part, such as a column-parallel layer, and scatter_from_ranks adds up such parts.
//
// Collective, in the order in which they are called; backward in the reverse order. name: of the layer, for
// errors.
// Tensors: of any sizes, the same on all ranks except for a slice's dimension `dim`, which `slices` tells.
// Errors: as parallel/rank_operators.h.
at::Tensor copy_to_ranks(const at::Tensor& tensor, const RanksPointer& ranks,
                         const std::string& name);
at::Tensor reduce_from_ranks(const at::Tensor& tensor, const RanksPointer& ranks,
                             const std::string& name);
at::Tensor split_to_ranks(const at::Tensor& tensor, const Slices& slices, const RanksPointer& ranks,
                          const std::string& name, int64_t dim = -1);
at::Tensor gather_from_ranks(const at::Tensor& slice, const Slices& slices,
                             const RanksPointer& ranks, const std::string& name, int64_t dim = -1);
at::Tensor gather_to_ranks(const at::Tensor& slice, const Slices& slices, const RanksPointer& ranks,
                           const std::string& name, int64_t dim);
at::Tensor scatter_from_ranks(const at::Tensor& tensor, const Slices& slices,
                              const RanksPointer& ranks, const std::string& name, int64_t dim);

// Random numbers that differ between the ranks of a group that otherwise draws alike.
//
//   torch::manual_seed(seed_of(data.rank()));     // alike on the ranks of `tensor`, other data ranks differ
//   x = torch::dropout(x, 0.1, true);             // whole on all ranks: the same mask
//   {
//     const parallel::RandomOfRank own(tensor);
//     y = torch::dropout(slice, 0.1, true);       // a slice on each rank: masks of their own
//   }
//
// Ranks of a tensor-parallel group begin with one seed, since a dropout of what all of them hold must be the
// same on all. In this scope the default generators continue from a number that was drawn before, mixed with the
// rank. After it they continue as if that number alone had been drawn. So the ranks still draw alike after
// it, a saved state has nothing more, and a checkpointed region that contains the scope repeats its numbers.
//
// Generators: LibTorch's defaults of the host and of the world's device, on which nothing is waited for.
// Cost: microseconds, and two copies of the host generator's state of 5 KB.
// Threads: as LibTorch's default generators, which are the process's: not for ranks that are threads of one.
class RandomOfRank {
 public:
  explicit RandomOfRank(const comm::World& world);
  ~RandomOfRank();
  RandomOfRank(const RandomOfRank&) = delete;
  RandomOfRank& operator=(const RandomOfRank&) = delete;

 private:
  struct Outside {
    at::Generator generator;
    at::Generator state;
  };
  std::vector<Outside> outside_;
};

}  // namespace zeropage::parallel

namespace zeropage {

// Batch norms that see the batches of all ranks, without a change to the module.
//
//   zeropage::sync_batch_norm(net, world);
//   zeropage::DistributedDataParallel<Net> model(net, world, options);
//
// C++ modules cannot be exchanged in place: forward() is not virtual, and members have their type. So what
// is changed is not the module but a tensor of each torch::nn::BatchNorm1d, 2d and 3d in it: the tensor gets
// a mark, and the trap (paging/trap.h), which sees every operator on it, runs parallel::SyncBatchNorm in place
// of a training aten::batch_norm. Call it before or after wrapping, at any stage; it works in checkpointed
// regions and under a Recompute too.
//
// What stays LibTorch's: eval mode, so a rank may evaluate alone; worlds of one rank; and a BatchNorm1d whose
// batch on this rank is a single row, which its forward refuses before any operator runs
// (parallel::SyncBatchNorm takes it).
//
// The mark lies on the tensor. ->to() would take it away and is refused afterwards: move the module first.
// A clone() of the module has no marks. A layer whose weight is replaced by another tensor has none either.
//
// Returns how many layers it marked. The module holds the world from then on. Collective: ranks agree on
// the layers first.
// Throws on all ranks alike if there is no BatchNorm, if one has no tensor that could carry a mark (neither
// affine nor running statistics: use parallel::SyncBatchNorm there), or if one is marked already.
size_t sync_batch_norm(torch::nn::Module& module, const comm::World& world);
// The same for a holder, such as `Net net;` with TORCH_MODULE(Net).
template <typename Contained>
size_t sync_batch_norm(const torch::nn::ModuleHolder<Contained>& holder, const comm::World& world) {
  return sync_batch_norm(*holder.ptr(), world);
}

}  // namespace zeropage
