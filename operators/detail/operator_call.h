// An operator that is about to run: its arguments on the stack and what its schema says of them.
//
// Lifetime: refers to the handle and the stack.
// Threads: one.
// Throws nothing of its own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "operators/operator_schema.h"

namespace zeropage::operators::detail {

struct OperatorCall {
  struct Operand {
    at::Tensor tensor;  // defined
    bool written;       // the schema says so
    bool is_out;
  };

  OperatorCall(const c10::OperatorHandle& handle, torch::jit::Stack& stack);

  const c10::FunctionSchema& schema() const { return handle.schema(); }
  size_t argument_count() const { return schema().arguments().size(); }
  // Valid until it runs.
  c10::IValue& argument(size_t index) const { return stack[first + index]; }
  std::optional<size_t> dtype_argument() const;
  std::optional<size_t> device_argument() const;

  // Makes the memory that torch::tensor({...}) is about to write without an operator.
  bool makes_literal() const;
  // All its tensors are real, and so may its results be.
  bool has_values() const;
  // Its results depend on the values of its tensors in more than their own values.
  bool reads_values() const;
  // Changes what tensors see, but no value.
  bool changes_geometry_only() const;
  // Writes every element of the tensors that it writes, and reads none of them.
  bool overwrites(const Operand& operand) const;

  const c10::OperatorHandle& handle;
  torch::jit::Stack& stack;
  const size_t first;
  const std::string name;  // with its namespace, without its overload
  std::vector<Operand> operands;
};

}  // namespace zeropage::operators::detail
