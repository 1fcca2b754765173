// `touch_all()`: a list of modules of which each rank runs others, such as experts.
#pragma once

#include <functional>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace zeropage {

// Runs a part of a forward in which each rank may use other modules of a list, in another order, or none of them.
//
//   y = zeropage::touch_all(experts, x, [&](const torch::Tensor& x) {
//     auto y = torch::zeros_like(x);
//     for (size_t e = 0; e < experts->size(); ++e) {
//       if (rows[e].numel() > 0)
//         y = y.index_add(0, rows[e], experts[e]->as<Expert>()->forward(x.index_select(0, rows[e])));
//     }
//     return y;
//   });
//
// At stage 3 an operator on a parameter gathers its page from all ranks, so ranks that run different operators are out of step.
// Here the pages of all parameters of `modules` are gathered before `run`, in one order, and kept until it has returned; so again
// in backward, before the first and until the last gradient within. What is run on them meanwhile is each rank's own affair. A
// parameter that a rank has not used gets a gradient of zeros there, at every stage; so optimizers that decay weights decay all.
//
// An expert that takes inputs of no rows needs none of this: run all of them on every rank, in one order.
// parallel::Experts (zeropage/experts.h) does so at once, with less memory and time.
//
// modules: of the wrapped module, or all of a list. run: called once, with `input`; all that it computes from these parameters must
// be in what it returns, and it must use no other sharded parameter on some ranks alone. Neither may be written to in place.
// Returns what run returns, of any sizes and dtype.
//
// Memory: at stage 3 all pages of the parameters at once, in forward and in backward; before and after, as ever. Their gathers are
// begun ahead as far as Options::prefetch_bytes and the pages that are there leave room. At other stages: nothing. Time: in backward an
// addition over each parameter that was used.
// Collective at stage 3: in forward, and in backward; all ranks call it with the same modules, also where they have no token.
// Works in checkpointed regions. Under a Recompute at stage 3 it throws, since ranks would repeat different operators.
// Threads: as the module's forward. Throws where Options::parameter_budget_bytes does not hold the pages at once, where run returns no
// tensor, and what run throws.
at::Tensor touch_all(const torch::nn::Module& modules, const at::Tensor& input,
                     const std::function<at::Tensor(const at::Tensor&)>& run);
// The same for a holder, such as a torch::nn::ModuleList.
template <typename Contained>
at::Tensor touch_all(const torch::nn::ModuleHolder<Contained>& modules, const at::Tensor& input,
                     const std::function<at::Tensor(const at::Tensor&)>& run) {
  return touch_all(*modules.ptr(), input, run);
}

}  // namespace zeropage
