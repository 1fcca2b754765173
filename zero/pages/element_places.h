// Which elements of their storages tensors are, in arrays.
//
// A tensor is compared with one of many without a look at that one's own description, which lies elsewhere in memory for
// each. Those that are noted have to stay what they are: nobody else has them, or they are no tensor's that scripts change in place.
//
// Lifetime: does not keep the storages; they outlive it. Threads: set() one, has() any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::zero {

class ElementPlaces {
 public:
  explicit ElementPlaces(size_t count) : places_(count) {}

  // At most once for each index. tensor: has a storage.
  void set(size_t index, const at::Tensor& tensor);
  // Whether the tensor has the storage, the sizes, the strides and the first element of the one that was set; false where
  // none was.
  bool has(size_t index, const at::Tensor& tensor) const;

 private:
  struct Place {
    const c10::StorageImpl* storage = nullptr;
    int64_t offset = 0;
    size_t begin = 0;  // of its sizes and then its strides in extents_
    size_t dimensions = 0;
  };

  std::vector<Place> places_;
  std::vector<int64_t> extents_;
};

}  // namespace zeropage::zero
