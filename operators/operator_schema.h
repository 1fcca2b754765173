// What an operator's schema says of its arguments and results.
//
// Threads: any; pure functions.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace zeropage::operators {

// The tensors of a value that is a tensor or a list of them; undefined ones too.
std::vector<at::Tensor> tensors_in(const c10::IValue& value);

// Whether the operator writes to the memory of that argument, or of tensors in it.
bool is_written(const c10::Argument& argument);

// Where it takes a generator.
std::optional<size_t> generator_argument(const c10::OperatorHandle& op);

// Whether its results depend on random numbers.
bool draws(const c10::OperatorHandle& op);

// Whether it reads and writes no memory itself: it returns views, or changes sizes and strides in
// place.
bool only_views(const c10::OperatorHandle& op);

}  // namespace zeropage::operators
