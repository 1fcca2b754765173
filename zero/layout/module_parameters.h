// The parameters of a module tree, each once, with every name it goes by.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>

#include "zero/options.h"

namespace zeropage {

struct NamedParameter {
  // In the order of named_parameters(); more than one for a tied parameter. Errors use the first.
  std::vector<std::string> names;
  at::Tensor tensor;
  int unit = 0;  // see StorageSpec::unit
  // Of its page, which it gets when it moves there.
  c10::ScalarType dtype = c10::ScalarType::Undefined;

  const std::string& name() const { return names.front(); }
};

// The parameter as a line "field: value", for comparing ranks.
std::string describe(const NamedParameter& parameter);

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module);
// The same, fp32 ones in options.compute_dtype unless a module that registers them stays fp32. Throws
// for others that train.
std::vector<NamedParameter> parameters_of(const torch::nn::Module& module, const Options& options);

// For a script that has only the tensors: names are "parameter 0", "parameter 1", ...
std::vector<NamedParameter> parameters_of(const std::vector<at::Tensor>& tensors);

}  // namespace zeropage
