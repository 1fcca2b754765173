// Tensors of the fake accelerator as the CPU's kernels see them.
#pragma once

#include <functional>
#include <unordered_map>

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace zeropage::testing {

// A CPU tensor over the same memory, which it does not own. Resized, it has memory of its own.
at::Tensor host_view(const at::Tensor& tensor);

// A meta tensor of the same sizes, strides and dtype.
at::Tensor meta_view(const at::Tensor& tensor);

// A copy of a CPU tensor that no ledger of a rank sees.
at::Tensor host_snapshot(const at::Tensor& tensor);

// Maps tensors, one and the same to one and the same; undefined ones to themselves.
class TensorMap {
 public:
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  // device: what device arguments become.
  TensorMap(c10::Device device, Function function)
      : device_(device), function_(std::move(function)) {}

  c10::IValue operator()(const c10::IValue& value);
  torch::jit::Stack all(const torch::jit::Stack& values);

 private:
  at::Tensor map(const at::Tensor& tensor);

  const c10::Device device_;
  const Function function_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> known_;
};

}  // namespace zeropage::testing
