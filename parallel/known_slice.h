// What is known of a tensor that is this rank's slice of a whole one: the mark on it says so. What operators do with it
// is parallel/slice_mark.h's.
//
// Lifetime, threads: those of operators/tensor_mark.h.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "operators/tensor_mark.h"
#include "zeropage/detail/slices.h"
#include "zeropage/world.h"

namespace zeropage::parallel {

class KnownSlice : public operators::TensorMark {
 public:
  // ranks: those of the group. cut: how the whole was cut.
  KnownSlice(std::string who, RanksPointer ranks, SlicedDimension cut)
      : TensorMark(std::move(who), On::kParameter),
        ranks_(std::move(ranks)),
        cut_(std::move(cut)) {}

  const comm::World& ranks() const { return ranks_->world; }
  const RanksPointer& group() const { return ranks_; }
  const SlicedDimension& cut() const { return cut_; }

  // Where ranks with other slices have other tokens: the ranks that have the same slice.
  virtual std::optional<comm::World> same_slices() const { return std::nullopt; }

  // For a tensor whose elements came from those of the slice.
  virtual c10::intrusive_ptr<KnownSlice> of_result() const = 0;
  // For its gradient.
  virtual c10::intrusive_ptr<KnownSlice> of_gradient() const = 0;

 private:
  const RanksPointer ranks_;
  const SlicedDimension cut_;
};

// Null for a tensor that was not cut.
inline const KnownSlice* known_slice_of(const at::Tensor& tensor) {
  return dynamic_cast<const KnownSlice*>(operators::mark_of(tensor));
}

// For a tensor that became like a slice of the same sizes; nothing for one that has a mark.
inline void mark_as_slice(const at::Tensor& tensor, const KnownSlice& like) {
  if (operators::mark_of(tensor) == nullptr) operators::set_mark(tensor, like.of_result());
}

}  // namespace zeropage::parallel
