// Brings the values of a module's parameters into their pages, one storage after the other, and gives
// every rank rank 0's values. They come from the module, or from the tape of one that was constructed
// without memory.
//
// A parameter stays the tensor that the module holds; only its storage's memory moves into a page. So
// collectives on a page update parameters in place.
//
// Lifetime: that of the wrapping. Collective.
#pragma once

#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/layout/deferred_values.h"
#include "zero/pages/master_weights.h"
#include "zero/pages/page_memory.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class PageFiller {
 public:
  PageFiller(const ParameterPages& pages, PageMemory& memory, MasterWeights& masters)
      : pages_(pages), memory_(memory), masters_(masters) {}

  // deferred: null for a module that has its values.
  void fill(const DeferredValues* deferred);

 private:
  const at::Tensor& first_in(size_t storage) const;
  void replay(const DeferredValues& deferred, const std::vector<size_t>& storages);
  at::Tensor own_experts(size_t storage, const at::Tensor& whole, const at::Tensor& values) const;
  void take_over(size_t storage, const at::Tensor& values);
  void keep_part(size_t storage, const at::Tensor& values);
  void live_in_page(size_t storage);

  const ParameterPages& pages_;
  PageMemory& memory_;
  MasterWeights& masters_;
};

}  // namespace zeropage::zero
