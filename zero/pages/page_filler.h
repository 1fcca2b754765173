// Brings the values of a module's parameters into their pages, one storage after the other, and gives
// every rank rank 0's values. They come from the module, or from the tape of one that was constructed
// without memory.
//
// What comes from a tape is computed by each rank, and no byte is sent where hashes of the ranks' values are the same. Where they differ,
// the storages that differ are computed once more and become rank 0's.
//
// A parameter stays the tensor that the module holds; only its storage's memory moves into a page. So
// collectives on a page update parameters in place.
//
// Lifetime: that of the wrapping. Collective.
#pragma once

#include <functional>
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
  // What a tape has of a storage: the storage, or that of all experts where they were cut.
  struct OnTape {
    size_t storage = 0;
    at::Tensor values;         // [numel], on the meta device
    at::Tensor whole_experts;  // shaped as before the cut; undefined: not cut
  };
  using TakeValues = std::function<void(const OnTape& on_tape, const at::Tensor& values)>;

  const at::Tensor& first_in(size_t storage) const;
  std::vector<OnTape> find_on_tape(const std::vector<size_t>& storages) const;
  void replay(const DeferredValues& deferred, const std::vector<size_t>& storages);
  void compute(const operators::ConstructionTape& tape, const std::vector<OnTape>& on_tape,
               const std::vector<at::Tensor>& buffers, const TakeValues& take) const;
  at::Tensor own_part(const OnTape& on_tape, const at::Tensor& values) const;
  void bring_whole_experts(size_t storage, const at::Tensor& values) const;
  void move_in(size_t storage, const at::Tensor& values);
  void keep_part(size_t storage, const at::Tensor& values);
  void live_in_page(size_t storage);

  const ParameterPages& pages_;
  PageMemory& memory_;
  MasterWeights& masters_;
};

}  // namespace zeropage::zero
