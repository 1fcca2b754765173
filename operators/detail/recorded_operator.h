// A recorded operator: its arguments as values and as views of numbered storages, and what it does
// to those storages.
//
// A storage is known by its StorageImpl; a TensorImpl changes under a parameter's feet
// (make_variable, set_data, transpose_), so a tensor is kept as the geometry that it had.
//
// Lifetime: values that own everything; a Tape keeps the meta storages and captured tensors alive.
// Threads: none of its own.
// Shapes: bytes of storages, elements of views.
// Throws c10::Error for tensors without a plain storage.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "operators/detail/random_states.h"
#include "operators/recorded_argument.h"

namespace zeropage::operators::detail {

// What a tensor sees of a storage.
struct TensorView {
  size_t storage;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  int64_t storage_bytes;  // when it was taken; resize_ grows storages
  bool conjugated;
  bool negated;
  bool wrapped_number;  // a Scalar that LibTorch made a tensor; it does not promote types
};

// An argument; it has no value for an undefined tensor.
using Argument = RecordedArgument<std::optional<TensorView>>;

// A random operator takes the generator's state from one value to another.
struct Draw {
  size_t before;
  size_t after;
  std::optional<size_t> argument;  // where it takes a generator; else it draws from the default one
};

struct RecordedOperator {
  c10::OperatorHandle handle;
  std::vector<Argument> arguments;
  std::vector<std::vector<std::optional<TensorView>>> results;  // on the storages that it made
  std::vector<size_t> reads;       // whose values it needs, also those that it changes in part
  std::vector<size_t> writes;      // whose values it changes
  std::vector<size_t> overwrites;  // of those: every value, by an argument that it does not read
  std::vector<size_t> makes;
  std::optional<Draw> draw;
};

struct RecordedStorage {
  c10::Storage meta;
  std::string made_by;
  std::vector<int64_t> sizes;  // of the tensor that it was made with
  at::Tensor captured;         // the real tensor on the storage that it stands for, if any
  std::optional<uint32_t> captured_version;
};

struct Tape {
  std::optional<size_t> find(const at::Tensor& meta) const;
  size_t add(RecordedStorage storage);
  const std::string& made_by(size_t storage) const { return storages[storage].made_by; }

  std::vector<RecordedStorage> storages;
  std::unordered_map<const c10::StorageImpl*, size_t> storage_numbers;
  std::vector<RecordedOperator> operators;
  RandomStates random;
};

// "aten::normal_", "aten::set_.source_Tensor".
std::string name_of(const c10::OperatorHandle& handle);

// A view as an error calls it: "float [3, 4]".
std::string describe(const at::Tensor& tensor);

TensorView view_of(const at::Tensor& tensor, size_t storage);

// The tensor on `storage` that sees the same as `view`.
at::Tensor tensor_of(const TensorView& view, const c10::Storage& storage);

bool contains(const std::vector<size_t>& numbers, size_t number);
void insert(std::vector<size_t>& numbers, size_t number);

}  // namespace zeropage::operators::detail
