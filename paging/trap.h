// The trap: sees every operator that takes a paged tensor, and makes its pages resident.
//
// A trapped tensor's TensorImpl carries one more dispatch key (operators/dispatch_keys.h); so do views
// of it. A boxed fallback on that key pins the pages of an operator's arguments, redispatches, and
// unpins. It works for any module, function or autograd node, in forward and backward.
//
// * Operators that only view (schema: an alias, not written) do not fault; those that decompose
//   into others, as reshape does, fault where they read.
// * Operators that write (schema says so) leave the page dirty.
// * A mark on an argument (operators/tensor_mark.h) is asked first, and may run something in the
//   operator's place.
// * Refused: resize_ and set_ of a trapped tensor, set_data() (which Module::to uses), and
//   clone() of a parameter itself outside of a guard (which Module::clone uses).
// * data_ptr() of a tensor whose page is not resident is null. What reads memory past the
//   dispatcher needs a Pins around it.
//
// Cost: 0.2 to 0.3 us an operator that takes a trapped tensor, also for those that one calls; nothing
// for others.
#pragma once

#include <ATen/core/TensorBody.h>

namespace zeropage::paging {

// Puts the tensor under the trap, where it stays. The TensorImpl stays the same object.
// REQUIRES: its storage is not paged yet. As long as it is not, the trap lets everything pass.
void set_trap(const at::Tensor& tensor);

// Throws unless this LibTorch's dispatcher treats the trap as the above says. Cheap
// after the first call.
void check_dispatcher();
// What it tries, in a SelfCheck (memory/self_check.h).
void probe_dispatcher();

}  // namespace zeropage::paging
