// The operator or the node of autograd's that the calling thread is in: who allocates what nobody named.
//
// LibTorch reports each operator at its begin and end, on the threads that look (OperatorNames) and on
// those that autograd starts for them. Costs some 100 ns an operator there, and nothing elsewhere.
// Threads: a scope on the thread that makes it.
#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/record_function.h>

namespace zeropage::profile {

class OperatorNames {
 public:
  OperatorNames();
  ~OperatorNames();
  OperatorNames(const OperatorNames&) = delete;
  OperatorNames& operator=(const OperatorNames&) = delete;

  // "aten::linear", "AddmmBackward0": the outermost that the calling thread is in; "": none, or nobody
  // looks. Valid until that ends.
  static std::string_view outermost();

 private:
  const at::CallbackHandle handle_;
};

}  // namespace zeropage::profile
