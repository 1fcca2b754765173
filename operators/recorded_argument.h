// An argument of an operator as a recording keeps it: a value, or what `Tensor` keeps of each tensor
// in it, in the form that a later call needs.
//
// Lifetime: a value that owns what it keeps. Threads: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

namespace zeropage::operators {

template <typename Tensor>
class RecordedArgument {
 public:
  // keep(tensor): what is kept of a tensor; undefined ones are asked for too.
  template <typename Keep>
  RecordedArgument(const c10::IValue& given, const Keep& keep) : form_(form_of(given)) {
    if (form_ == Form::kTensor) {
      tensors_.push_back(keep(given.toTensor()));
    } else if (form_ == Form::kTensors) {
      for (const at::Tensor& tensor : given.toTensorVector()) tensors_.push_back(keep(tensor));
    } else if (form_ == Form::kOptionalTensors) {
      for (const auto& tensor : given.toOptionalTensorVector()) {
        tensors_.push_back(keep(tensor.value_or(at::Tensor())));
      }
    } else {
      value_ = given;
    }
  }

  // None, and no tensors, where there are tensors.
  const c10::IValue& value() const { return value_; }
  // REQUIRES: there are no tensors.
  void set_value(c10::IValue value) { value_ = std::move(value); }
  // In their order; empty for what holds none.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  std::vector<Tensor>& tensors() { return tensors_; }

  // The argument with make(kept) for each tensor, which may be undefined.
  template <typename Make>
  c10::IValue with(const Make& make) const {
    switch (form_) {
      case Form::kValue:
        return value_;
      case Form::kTensor:
        return make(tensors_.front());
      case Form::kTensors: {
        c10::List<at::Tensor> list;
        for (const Tensor& kept : tensors_) list.push_back(make(kept));
        return list;
      }
      case Form::kOptionalTensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (const Tensor& kept : tensors_) {
          const at::Tensor& tensor = make(kept);
          list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
        }
        return list;
      }
    }
    TORCH_INTERNAL_ASSERT(false);
  }

 private:
  enum class Form : uint8_t { kValue, kTensor, kTensors, kOptionalTensors };

  static Form form_of(const c10::IValue& given) {
    if (given.isTensor()) return Form::kTensor;
    if (given.isTensorList()) return Form::kTensors;
    return given.isOptionalTensorList() ? Form::kOptionalTensors : Form::kValue;
  }

  Form form_;
  c10::IValue value_;
  std::vector<Tensor> tensors_;
};

}  // namespace zeropage::operators
