// How an operator may run on the fake accelerator, by its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace zeropage::testing {

enum class Manner {
  kAsync,
  kReadsValues,    // its results' sizes or types depend on values
  kCannotBeAsync,  // it draws random numbers
};
Manner manner_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// Where the operator runs. As on a GPU, tensors of several devices do not mix, but for numbers and
// indices on the host.
c10::Device device_of(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments);

}  // namespace zeropage::testing
