// The mark of a parameter that was cut in place, so that each rank of a tensor-parallel group has another
// slice of it. A layer that is made of slices says so itself (parallel/sliced_layer.h).
//
// No operator takes the slice for the whole. What an operator may do with it (parallel/slice_use.h):
//
// * What does the same to each element, such as an optimizer's operators, does it to the slice. Where gradients are not
//   needed, a new tensor of the same sizes is a slice too, and gets a mark: a copy, a product with a mask.
// * Norms, sums and comparisons are those of the whole, which is gathered for a moment. They are collective then.
// * randn_like() draws for the whole, and keeps the slice. Other draws throw: the fans that an init function
//   takes are sizes, and those are the slice's.
// * copy_() and set_(), which is what torch::load() calls, take whole values too, and keep the slice of them.
// * torch::save() throws, as it would write a slice under the name of the whole.
// * The rest throws.
//
// What it cannot see: data_ptr(), and the memory of a tensor that the script filled by an operator in place, such as
// zeros_like(p).add_(p).
//
// Lifetime, threads: those of operators/tensor_mark.h.
#pragma once

#include <string>

#include "comm/world.h"
#include "operators/tensor_mark.h"
#include "parallel/ranks.h"
#include "parallel/slice_use.h"
#include "parallel/slices.h"

namespace zeropage::parallel {

class SliceMark : public memory::TensorMark {
 public:
  // ranks: those of the group. cut: how the whole was cut.
  SliceMark(std::string who, RanksPointer ranks, SlicedDimension cut);

  bool replaces(const c10::OperatorHandle& handle) const override;
  bool run(const c10::OperatorHandle& handle, const at::Tensor& marked,
           torch::jit::Stack& stack) override;

  const comm::World& ranks() const { return ranks_->world; }
  const SlicedDimension& cut() const { return cut_; }
  // The whole of what the mark is on. Collective; without a mark and without gradients.
  at::Tensor whole_of(const at::Tensor& slice) const;

 protected:
  // For a tensor whose elements came from those of the slice.
  virtual c10::intrusive_ptr<SliceMark> of_result() const;
  // Whether the operator may take the slice for what it is, beside those that take elements.
  virtual bool takes_slice(const c10::OperatorHandle& handle,
                           at::ArrayRef<c10::IValue> arguments) const;
  // Whether it may be spread over a larger tensor: a bias over rows, but no weight, whose product it would be.
  virtual bool may_be_spread() const { return true; }
  // gradients: whether they are needed.
  [[noreturn]] void refuse(const c10::OperatorHandle& handle, bool gradients) const;

 private:
  // false: the mark of another argument has to.
  bool run_on_slice(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments,
                    torch::jit::Stack& stack) const;
  void run_on_elements(const c10::OperatorHandle& handle, const at::Tensor& marked,
                       torch::jit::Stack& stack) const;
  void run_on_whole(const c10::OperatorHandle& handle, const at::Tensor& marked,
                    torch::jit::Stack& stack) const;
  void draw_whole(const c10::OperatorHandle& handle, const at::Tensor& marked,
                  torch::jit::Stack& stack) const;
  void take_slice_of_source(const c10::OperatorHandle& handle, const at::Tensor& marked,
                            torch::jit::Stack& stack) const;
  // Whether an argument is a tensor that is not known to be a slice, such as the activation that a bias is added to.
  bool meets_no_slice(at::ArrayRef<c10::IValue> arguments) const;
  void check_is_cut_alike(const c10::OperatorHandle& handle, const at::Tensor& marked,
                          at::ArrayRef<c10::IValue> arguments) const;

  const RanksPointer ranks_;
  const SlicedDimension cut_;
};

// Null for a tensor that was not cut.
const SliceMark* slice_mark_of(const at::Tensor& tensor);

bool slices_are_seen();
// While it lives, marks of slices see no operator of this thread: whoever knows that it has slices handles them.
class SlicesAsTheyAre {
 public:
  SlicesAsTheyAre();
  ~SlicesAsTheyAre();
  SlicesAsTheyAre(const SlicesAsTheyAre&) = delete;
  SlicesAsTheyAre& operator=(const SlicesAsTheyAre&) = delete;

 private:
  const bool before_;
};

}  // namespace zeropage::parallel
