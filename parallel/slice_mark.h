// The mark of a parameter that was cut in place, so that each rank of a tensor-parallel group has another
// slice of it. A layer that is made of slices says so itself (zeropage/parallel_layers.h).
//
// No operator takes the slice for the whole. What an operator may do with it (parallel/slice_use.h):
//
// * What does the same to each element, such as an optimizer's operators, does it to the slice. Where gradients are not
//   needed, a new tensor of the same sizes is a slice too, and gets a mark: a copy, a product with a mask, zeros_like().
//   So does a tensor of the script's that the operator writes to (parallel/slice_arguments.h), or it throws.
// * What is given beside a slice, such as a mask or the norms of rows, may be of the whole one; it is cut for the
//   operator. So copy_() and set_(), which is what torch::load() calls, take whole values.
// * Norms, sums and comparisons are those of the whole, which is gathered for a moment. They are collective then.
// * randn_like() draws for the whole, and keeps the slice. Other draws throw: the fans that an init function
//   takes are sizes, and those are the slice's.
// * torch::save() throws, as it would write a slice under the name of the whole.
// * The rest throws.
//
// The gradient of a slice has such a mark too (parallel/slice_gradient.h). What no mark can see: data_ptr().
//
// Lifetime, threads: those of operators/tensor_mark.h.
#pragma once

#include <string>

#include "parallel/known_slice.h"
#include "parallel/slice_use.h"

namespace zeropage::parallel {

class SliceMark : public KnownSlice {
 public:
  // ranks: those of the group. cut: how the whole was cut.
  SliceMark(std::string who, RanksPointer ranks, SlicedDimension cut);

  bool replaces(const c10::OperatorHandle& handle) const override;
  bool run(const c10::OperatorHandle& handle, const at::Tensor& marked,
           torch::jit::Stack& stack) override;

  c10::intrusive_ptr<KnownSlice> of_result() const override;
  c10::intrusive_ptr<KnownSlice> of_gradient() const override;
  // The whole of what the mark is on. Collective; without a mark and without gradients.
  at::Tensor whole_of(const at::Tensor& slice) const;

 protected:
  // Whether the operator may take the slice for what it is, beside those that take elements.
  virtual bool takes_slice(const c10::OperatorHandle& handle,
                           at::ArrayRef<c10::IValue> arguments) const;
  // Whether it may be spread over a larger tensor: a bias over rows, but no weight, whose product it would be.
  virtual bool may_be_spread() const { return true; }
  // What a refusal says to do about an operator that is none of those.
  virtual const char* way_out() const;
  // The same where gradients are needed, behind what was expected.
  virtual const char* expected_layer() const { return "a linear layer or an embedding"; }
  virtual const char* way_out_of_layer() const {
    return "call the layer's forward(), or leave it out of the plan, and convert the module before";
  }
  // What cut the parameter.
  virtual const char* cut_by() const { return "tensor_parallel()"; }
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
  void run_like(const c10::OperatorHandle& handle, const at::Tensor& marked,
                torch::jit::Stack& stack) const;
  // set_() alone, which takes memory as it is.
  void take_slice_of_source(const c10::OperatorHandle& handle, const at::Tensor& marked,
                            torch::jit::Stack& stack) const;
  // Whether an argument is a tensor that is not known to be a slice, such as the activation that a bias is added to.
  bool meets_no_slice(at::ArrayRef<c10::IValue> arguments) const;
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
