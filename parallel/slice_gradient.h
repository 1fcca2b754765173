// The mark of the gradient of a slice: it is this rank's part of the whole gradient, as the slice is of the parameter,
// and operators on it do what they do with the slice (parallel/slice_mark.h).
//
// Hooks on the parameter mark what backward brings, in front of the script's own hooks and behind them, before it is
// accumulated. So p.grad(), what torch::autograd::grad() returns and what hooks see have the mark. Who gives a parameter
// another p.grad() marks that.
//
// Cost: a test of the parameter's hooks for each layer in forward; in backward the trap's (paging/trap.h) for what
// autograd does with a gradient. A gradient that others hold too is copied, which autograd would do otherwise.
// Threads: watch_gradient() on the thread of forward, while no backward runs.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace zeropage::parallel {

// Before an operator on the tensor whose gradient will be asked for. Nothing for what is no slice, or no leaf.
void watch_gradient(const at::Tensor& parameter);

// Gives the gradient its mark. kept: what it keeps alive (TensorMark::keep). false: the parameter is no slice, and nothing
// was done. REQUIRES: the gradient is no tensor that others take for another one.
bool mark_as_gradient(const at::Tensor& gradient, const at::Tensor& parameter,
                      c10::intrusive_ptr<c10::BackendMeta> kept = {});

}  // namespace zeropage::parallel
