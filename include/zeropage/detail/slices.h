// Which slice of a tensor a rank of a tensor axis has.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/custom_class.h>

#include "zeropage/communicator.h"
#include "zeropage/world.h"

// Which part of a dimension each rank of a tensor-parallel group has.

namespace zeropage::parallel {

// A dimension of `total` elements, cut into as many slices as there are ranks. Slices differ by one unit at most:
// two ranks have 128 and 129 of 257 elements.
class Slices {
 public:
  // unit: elements that stay together, such as those of an attention head.
  // Throws unless `total` is a multiple of it and there is a unit for each rank. who: for the error.
  Slices(int64_t total, int64_t unit, int ranks, const std::string& who);

  int64_t total() const { return total_; }
  int64_t unit() const { return unit_; }
  int ranks() const { return ranks_; }
  int64_t begin(int rank) const { return total_ / unit_ * rank / ranks_ * unit_; }
  int64_t end(int rank) const { return begin(rank + 1); }
  bool are_even() const { return total_ / unit_ % ranks_ == 0; }
  int64_t size(int rank) const { return end(rank) - begin(rank); }
  std::vector<int64_t> sizes() const;

 private:
  int64_t total_;
  int64_t unit_;
  int ranks_;
};

// Throws if ranks would get different numbers of units. option: the one that allows it. who: for the error.
void check_is_even(const Slices& slices, const std::string& who, const std::string& option);

// How a tensor was cut: dimension `dim` of the whole is stretches one behind the other, such as the rows of queries, keys
// and values, and each is cut for itself.
class SlicedDimension {
 public:
  // parts: one for each stretch, over the same ranks.
  SlicedDimension(std::vector<Slices> parts, int64_t dim) : parts_(std::move(parts)), dim_(dim) {}
  // parts: how many stretches there are that are cut as `slices`.
  explicit SlicedDimension(const Slices& slices, int64_t dim = 0, int64_t parts = 1)
      : SlicedDimension(std::vector<Slices>(static_cast<size_t>(parts), slices), dim) {}

  const std::vector<Slices>& parts() const { return parts_; }
  int64_t dim() const { return dim_; }
  // Elements of the dimension, of all ranks and of one.
  int64_t total() const;
  int64_t size(int rank) const;
  bool is_cut_as(const SlicedDimension& other) const;

  // A copy of a rank's elements.
  at::Tensor take(const at::Tensor& whole, int rank) const { return take(whole, dim_, rank); }
  // The same where dimension `dim` of a tensor stands for the one that is cut, as in what is broadcast against it.
  at::Tensor take(const at::Tensor& whole, int64_t dim, int rank) const;
  // Sizes of the whole tensor, if one slice has these sizes.
  std::vector<int64_t> whole_sizes(at::IntArrayRef sizes) const;

 private:
  std::vector<Slices> parts_;
  int64_t dim_;
};

// A layer whose parameters are slices: each rank of a group has another part of them, while
// parameters of other layers are the same on all its ranks. Sums over all parameters depend on it: slices add up
// over the group, and whole parameters count once.
//
// A parameter that was cut in place has a mark that says the same (parallel/slice_mark.h).
// Threads: as the layer.

struct SlicedParameter {
  at::Tensor slice;  // may be undefined
  SlicedDimension cut;
};

// What a torch::nn::Module also is that registers slices as its parameters.
class SlicedLayer {
 public:
  virtual ~SlicedLayer() = default;
  // Those of the parameters that it registers itself which are slices.
  virtual std::vector<SlicedParameter> sliced_parameters() const = 0;
  // The ranks that have the other slices.
  virtual const comm::World& ranks_of_slices() const = 0;
  // Where ranks with other slices have other tokens, as experts (zeropage/expert_parallel.h): the ranks that have the same slices.
  virtual std::optional<comm::World> ranks_of_same_slices() const { return std::nullopt; }
  // Buffers that a call between two steps changes by the tokens that this layer has seen on this rank, as Experts::balance_bias.
  virtual std::vector<at::Tensor> buffers_by_own_tokens() const { return {}; }

 protected:
  SlicedLayer() = default;
  SlicedLayer(const SlicedLayer&) = default;
  SlicedLayer& operator=(const SlicedLayer&) = default;
};

// A world as an argument of an operator that LibTorch's dispatcher calls.
class Ranks : public torch::CustomClassHolder {
 public:
  explicit Ranks(comm::World of_world) : world(std::move(of_world)) {}
  const comm::World world;
};
using RanksPointer = c10::intrusive_ptr<Ranks>;

inline RanksPointer ranks_of(const comm::World& world) {
  return c10::make_intrusive<Ranks>(world);
}

}  // namespace zeropage::parallel
