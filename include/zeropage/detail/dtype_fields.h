// LibTorch's types in tables of options (zeropage/fields.h).
#pragma once

#include <array>
#include <string>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "zeropage/fields.h"

namespace zeropage::memory {

// A dtype that no option takes has no word, and LibTorch's name.
template <>
struct Foreign<c10::ScalarType> {
  static constexpr auto words() {
    return std::array{word<c10::ScalarType::Float>("fp32"), word<c10::ScalarType::BFloat16>("bf16"),
                      word<c10::ScalarType::Half>("fp16"), word<c10::ScalarType::Double>("fp64")};
  }
  static std::string text(c10::ScalarType value) { return c10::toString(value); }
};

template <>
struct Foreign<c10::DeviceType> {
  static std::string text(c10::DeviceType value) {
    return c10::DeviceTypeName(value, /*lower_case=*/true);
  }
};

}  // namespace zeropage::memory
