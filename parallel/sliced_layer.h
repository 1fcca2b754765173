// A layer whose parameters are slices: each rank of a tensor-parallel group has another part of them, while
// parameters of other layers are the same on all its ranks. Sums over all parameters depend on it: slices add up
// over the group, and whole parameters count once.
//
// A parameter that was cut in place has a mark that says the same (parallel/slice_mark.h).
// Threads: as the layer.
#pragma once

#include <vector>

#include <ATen/core/TensorBody.h>

#include "comm/world.h"
#include "parallel/slices.h"

namespace zeropage::parallel {

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

 protected:
  SlicedLayer() = default;
  SlicedLayer(const SlicedLayer&) = default;
  SlicedLayer& operator=(const SlicedLayer&) = default;
};

}  // namespace zeropage::parallel
