// The parameters of a rank and their places in pages: by index, by page, and by the tensor itself.
//
// A pass over pages asks of_page() for each, and so does not look at the parameters of all pages each time.
//
// Threads: constant once they are placed.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/layout/module_parameters.h"
#include "zero/layout/shard_layout.h"

namespace zeropage::zero {

struct PlacedParameter {
  NamedParameter parameter;
  size_t page = 0;
  // Where the parameter's elements lie in the page, gaps of a strided parameter included.
  Range range;
  // Where its first element lies in the page.
  int64_t offset = 0;
};

class PlacedParameters {
 public:
  PlacedParameters() = default;
  // In the module's order. Each has its place.
  PlacedParameters(std::vector<PlacedParameter> parameters, size_t pages);

  size_t size() const { return parameters_.size(); }
  const PlacedParameter& operator[](size_t index) const { return parameters_[index]; }
  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }

  // The parameter's tensor, and the page and offset of its first element, in a row for all parameters: what is done to each
  // of many small ones in every step reads no more than it needs.
  c10::TensorImpl& impl(size_t index) const { return *spots_[index].impl; }
  size_t page(size_t index) const { return spots_[index].page; }
  int64_t offset(size_t index) const { return spots_[index].offset; }

  // Indices of the page's, ascending.
  const std::vector<size_t>& of_page(size_t page) const { return of_pages_[page]; }
  // Index of a tensor, or -1 if it is none of them.
  int64_t index_of(const at::Tensor& tensor) const;

 private:
  std::vector<PlacedParameter> parameters_;
  struct Spot {
    c10::TensorImpl* impl = nullptr;
    size_t page = 0;
    int64_t offset = 0;
  };
  std::vector<Spot> spots_;  // of them
  std::vector<std::vector<size_t>> of_pages_;
  std::unordered_map<const at::TensorImpl*, size_t> index_;
};

}  // namespace zeropage::zero
