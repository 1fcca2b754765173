// Counts the operators of the calling thread that cost a matrix product or a convolution, while it lives; also those of
// a backward on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/record_function.h>

namespace zeropage::testing {

class MatrixProducts {
 public:
  MatrixProducts()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(
                [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
                  count() += products_of(function);
                  return nullptr;
                })
                .needsInputs(true)
                .scopes({at::RecordScope::FUNCTION}))) {
    count() = 0;
  }
  ~MatrixProducts() { at::removeCallback(handle_); }
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  int64_t seen() const { return count(); }

 private:
  static int64_t& count() {
    thread_local int64_t count = 0;
    return count;
  }

  static int64_t products_of(const at::RecordFunction& function) {
    const std::string name = function.name();
    // A product for each of the gradients that it is asked for.
    if (name == "aten::convolution_backward") {
      const auto asked = function.inputs().back().toBoolList();
      return (asked[0] ? 1 : 0) + (asked[1] ? 1 : 0);
    }
    for (const char* product : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv",
                                "aten::_scaled_dot_product_flash_attention_for_cpu_backward"}) {
      if (name == product) return 1;
    }
    return 0;
  }

  const at::CallbackHandle handle_;
};

}  // namespace zeropage::testing
