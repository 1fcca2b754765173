// What there is to know of an operator for repeating it.
//
// Threads: any; each thread learns for itself.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace zeropage::checkpointing::detail {

struct OperatorFacts {
  std::string name;  // "aten::addmm"
  // It is made of other operators; those are what computes.
  bool is_composite = false;
  // Its results are views of its arguments, or it changes geometry only: no memory is touched.
  bool only_views = false;
  // Arguments whose memory it writes, by its schema.
  std::vector<size_t> written;
  // Those among them that it does not return. Autograd saves such an argument before it is written, as the noise of rrelu.
  std::vector<size_t> filled;
  // Arguments that it writes if the flag at `training` is set, though its schema is silent:
  // running statistics.
  std::vector<size_t> statistics;
  size_t training = 0;
};

const OperatorFacts& facts_of(const c10::OperatorHandle& handle);

// The tensors that the call on top of the stack will write; defined ones.
std::vector<at::Tensor> written_tensors(const OperatorFacts& facts,
                                        at::ArrayRef<c10::IValue> arguments);

// Floating-point operations of a matrix product, convolution or attention, two for a multiply-add,
// from the shapes of its arguments; 0 for all others, as is the custom (Kaplan et al. 2020, section
// 2.1; Narayanan et al. 2021, appendix). A product of no elements counts 1, so that ranks with other numbers of rows tell the same
// operators from others.
double flops_of(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments);

// Where the operator computes: the device of its arguments that is not the host, if one is.
c10::Device place_of_arguments(at::ArrayRef<c10::IValue> arguments);

}  // namespace zeropage::checkpointing::detail
