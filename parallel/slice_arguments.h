// What an operator that does the same to each element takes beside a slice, and what it writes from one.
//
// In a list, such as those of _foreach_lerp_(), what has one place belongs together.
//
// Threads: any. They throw in words that name the slice.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/intrusive_ptr.h>

namespace zeropage::parallel {

// Throws where slices meet that are cut at other places.
void check_are_cut_alike(const c10::OperatorHandle& handle, const at::Tensor& marked,
                         at::ArrayRef<c10::IValue> arguments);

// Where an argument without a mark has as many elements along the cut dimension as the whole, such as a mask, whole
// values that are copied, or the norms of rows: this rank's slice takes its place. Throws for one that fits neither.
void take_slices_beside(const c10::OperatorHandle& handle, const at::Tensor& marked,
                        torch::jit::Stack& stack);

// The tensors without a mark that an operator writes to from slices of the same sizes: x.copy_(slice), add_out(x, ...).
class BecomingSlices {
 public:
  // Before the operator. Throws where one cannot become a slice: where other tensors share its memory, which would not be
  // known for slices, where it requires a gradient, or where it is of the whole's sizes.
  BecomingSlices(const c10::OperatorHandle& handle, const at::Tensor& marked,
                 at::ArrayRef<c10::IValue> arguments);
  // After it.
  void mark() const;

 private:
  struct Written {
    at::Tensor tensor;
    at::Tensor from;  // has the mark
  };
  void add(const c10::OperatorHandle& handle, const at::Tensor& tensor, const at::Tensor& from);

  std::vector<Written> written_;
};

}  // namespace zeropage::parallel
