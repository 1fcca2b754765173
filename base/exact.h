// Integer arithmetic that throws instead of rounding.
#pragma once

#include <limits>
#include <string>
#include <type_traits>

#include "zeropage/check.h"

namespace zeropage::base {

// numerator / denominator, which must be a whole number.
template <typename Integer>
constexpr Integer div_exact(Integer numerator, Integer denominator) {
  ZP_CHECK(denominator != 0 && numerator % denominator == 0, "div_exact: ", numerator,
           " is not a multiple of ", denominator);
  return numerator / denominator;
}

// The smallest whole number >= numerator / denominator.
// REQUIRES: numerator >= 0, denominator > 0.
template <typename Integer>
constexpr Integer div_ceil(Integer numerator, Integer denominator) {
  return (numerator + denominator - 1) / denominator;
}

// The smallest multiple of `multiple` that is >= value.
// REQUIRES: value >= 0, multiple > 0.
template <typename Integer>
constexpr Integer round_up(Integer value, Integer multiple) {
  return div_ceil(value, multiple) * multiple;
}

// Converts between integer types; throws when the value does not fit.
template <typename To, typename From>
constexpr To narrow(From value) {
  static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
  const To result = static_cast<To>(value);
  ZP_CHECK(static_cast<From>(result) == value && (result < To{}) == (value < From{}),
           "narrow: ", value, " does not fit into ", sizeof(To), " bytes");
  return result;
}

}  // namespace zeropage::base
