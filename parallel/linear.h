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
#pragma once

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
  // number belong together, as with Cut::uneven() (zero/tensor_parallel.h). A whole input or output does not need
  // it.
  bool uneven = false;
  // Column-parallel: gathers the output, which is then whole. Not with parts.
  bool gathers_output = false;
  // Row-parallel: takes a whole input and cuts it. Else it is this rank's slice already.
  bool splits_input = false;
  // The dimension of the sequence, counted from 0, where the tokens outside a column and its row are cut over
  // the same ranks (parallel/sequence.h). A column takes this rank's tokens and gathers all. A row adds up
  // and returns this rank's. Unset: all ranks have all tokens.
  std::optional<int64_t> sequence_dim;
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

}  // namespace zeropage::parallel
