// The fused operators as LibTorch's dispatcher has them, and what their sources share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include <ATen/ATen.h>

#include "fused/cpu/loops.h"
#include "operators/operator_handle.h"

namespace zeropage::fused {

using operators::operator_of;

// The dtype of what is computed between an operator's inputs and outputs.
inline at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Whether it has the element type of loops and kernels.
inline bool is_of_loops(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Whether cpu/loops.h has loops for it.
inline bool has_loops(const at::Tensor& tensor) {
  return tensor.is_cpu() && is_of_loops(tensor);
}

// The stream on which kernels for it run, as a cudaStream_t; nothing where there are none for it: other devices, fp64, a build without
// CUDA.
std::optional<void*> kernel_stream(const at::Tensor& tensor);

// Whether an operator on it makes one pass, by loops or by kernels of that stream, rather than several by LibTorch's operators. A tensor
// without elements (meta) stands for one that does, so that a simulated run holds what one pass holds.
inline bool has_one_pass(const at::Tensor& tensor, const std::optional<void*>& stream) {
  return stream || has_loops(tensor) || (tensor.is_meta() && is_of_loops(tensor));
}

// Calls visit.template operator()<T>() for the element type of a tensor that has_one_pass(). One without elements has none to visit.
template <typename Visit>
void visit_elements(const at::Tensor& tensor, const Visit& visit) {
  if (tensor.is_meta()) return;
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return visit.template operator()<float>();
    case at::kBFloat16:
      return visit.template operator()<optim::BFloat16Bits>();
    default:
      return visit.template operator()<optim::HalfBits>();
  }
}

// Null for an undefined tensor.
template <typename T>
T* elements(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

inline at::Tensor value_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

// Sums over rows, such as a norm weight's gradient, are made in at most this many parts, of rows that depend on nothing else. So
// their bits do not depend on the number of threads.
inline constexpr int64_t kMostParts = 32;
inline constexpr int64_t kLeastRowsOfPart = 16;
inline int64_t rows_of_part(int64_t rows) {
  return std::max(kLeastRowsOfPart, (rows + kMostParts - 1) / kMostParts);
}
// The same on a device, which has more processors: rows part, part + parts, ... each.
inline constexpr int64_t kMostPartsOnDevice = 256;
inline int64_t parts_on_device(int64_t rows) {
  return std::min(kMostPartsOnDevice, rows);
}

// Throws in a backward that is to be differentiated. who: the operator.
void refuse_second_derivative(const char* who);
// Throws unless tensors have one dtype, that of a floating-point number, and one device. who: the operator; what: the second's name.
void check_alike(const char* who, const at::Tensor& first, const at::Tensor& second,
                 const char* what);

}  // namespace zeropage::fused
