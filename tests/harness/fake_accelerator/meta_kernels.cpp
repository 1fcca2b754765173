#include "tests/harness/fake_accelerator/meta_kernels.h"

#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>

namespace zeropage::testing {
namespace {

using at::IntArrayRef;
using at::Tensor;

Tensor isnan(const Tensor& self) {
  return at::empty_like(self, self.options().dtype(at::kBool));
}

Tensor scalar_like(const Tensor& self) {
  return at::empty({}, self.options());
}

Tensor dot(const Tensor& self, const Tensor&) {
  return scalar_like(self);
}

Tensor like(const Tensor& self, IntArrayRef) {
  return at::empty_like(self, at::MemoryFormat::Contiguous);
}

Tensor roll(const Tensor& self, IntArrayRef, IntArrayRef) {
  return like(self, {});
}

// var and std
Tensor deviation(const Tensor& self, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>&,
                 bool keepdim) {
  const bool all = !dims || dims->empty();
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    bool reduced = all;
    for (size_t index = 0; !all && index < dims->size(); ++index)
      reduced = reduced || at::maybe_wrap_dim((*dims)[index], self.dim()) == dim;
    if (!reduced) sizes.push_back(self.size(dim));
    if (reduced && keepdim) sizes.push_back(1);
  }
  return at::empty(sizes, self.options());
}

Tensor floor_divide(const Tensor& self, const Tensor& other) {
  return at::empty(at::infer_size(self.sizes(), other.sizes()),
                   self.options().dtype(at::result_type(self, other)));
}

}  // namespace

void add_meta_kernels(torch::Library& aten_meta) {
  aten_meta.impl("isnan", &isnan);
  aten_meta.impl("dot", &dot);
  aten_meta.impl("max", &scalar_like);
  aten_meta.impl("min", &scalar_like);
  aten_meta.impl("flip", &like);
  aten_meta.impl("roll", &roll);
  aten_meta.impl("var.correction", &deviation);
  aten_meta.impl("std.correction", &deviation);
  aten_meta.impl("floor_divide", &floor_divide);
}

}  // namespace zeropage::testing
