// The parameters of a module tree, each once, with every name it goes by.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>

#include "zeropage/detail/slices.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage::zero {

// The slice of a parameter that several ranks share (zeropage/parallel_layers.h).
struct ParameterSlice {
  comm::World ranks;  // that have the slices
  parallel::SlicedDimension cut;
  // The ranks that have the same slice, of experts (zeropage/expert_parallel.h). Those with other slices have other tokens.
  std::optional<comm::World> same_experts = {};
};

struct NamedParameter {
  // In the order of named_parameters(); more than one for a tied parameter. Errors use the first.
  std::vector<std::string> names;
  at::Tensor tensor;
  int unit = 0;  // see StorageSpec::unit
  // The dtype of its page, which it gets when it moves there.
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::optional<ParameterSlice> slice = {};
  // Whether another stage of a pipeline has the same weight, and whether that one counts in norms.
  bool is_tied = false;
  bool counts_elsewhere = false;

  const std::string& name() const { return names.front(); }
  bool is_of_experts() const { return slice && slice->same_experts; }
  // Sizes of the whole parameter.
  std::vector<int64_t> whole_sizes() const;
};

// The parameter as a line "field: value", for comparing ranks.
std::string describe(const NamedParameter& parameter);

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module);
// The same, fp32 ones in options.compute_dtype unless a module that registers them stays fp32. Throws
// for others that train.
std::vector<NamedParameter> parameters_of(const torch::nn::Module& module, const Options& options);

// The ranks of a tensor axis over which parameters are slices; none where all are whole, or experts. Throws where they are slices
// over different ranks.
std::optional<comm::World> tensor_world_of(const std::vector<NamedParameter>& parameters);

// How experts are cut over ranks; null where they are not. Throws where they are cut over different ranks, or other parameters are cut
// too.
const ParameterSlice* cut_of_experts(const std::vector<NamedParameter>& parameters);

// For a script that has only the tensors: names are "parameter 0", "parameter 1", ...
std::vector<NamedParameter> parameters_of(const std::vector<at::Tensor>& tensors);

}  // namespace zeropage::zero
