#include "tools/element_values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace zeropage::tools {
namespace {

using state::Dtype;

template <typename T>
T as(const char* element) {
  T value;
  std::memcpy(&value, element, sizeof(value));
  return value;
}

// 5 bits of exponent, 10 of fraction (IEEE 754, binary16).
long double of_half(uint16_t bits) {
  constexpr int kFractionBits = 10;
  const int exponent = bits >> kFractionBits & 0x1f;
  const int fraction = bits & 0x3ff;
  long double value = 0;
  if (exponent == 0x1f) {
    value = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<long double>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<long double>(fraction + 0x400), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

}  // namespace

long double value_of(Dtype dtype, const char* element) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
      return as<uint8_t>(element);
    case Dtype::kI8:
      return as<int8_t>(element);
    case Dtype::kI16:
      return as<int16_t>(element);
    case Dtype::kU16:
      return as<uint16_t>(element);
    case Dtype::kF16:
      return of_half(as<uint16_t>(element));
    case Dtype::kBF16:
      return std::bit_cast<float>(static_cast<uint32_t>(as<uint16_t>(element)) << 16);
    case Dtype::kI32:
      return as<int32_t>(element);
    case Dtype::kU32:
      return as<uint32_t>(element);
    case Dtype::kF32:
      return as<float>(element);
    case Dtype::kI64:
      return static_cast<long double>(as<int64_t>(element));
    case Dtype::kU64:
      return static_cast<long double>(as<uint64_t>(element));
    case Dtype::kF64:
      return as<double>(element);
  }
  return NAN;
}

void ElementDifference::add(Dtype dtype, uint64_t index, uint64_t elements, const char* a,
                            const char* b) {
  const uint64_t bytes = state::size_of(dtype);
  if (std::memcmp(a, b, elements * bytes) == 0) return;
  for (uint64_t i = 0; i < elements; ++i, a += bytes, b += bytes) {
    if (std::memcmp(a, b, bytes) == 0) continue;
    ++numel;
    if (!first) first = index + i;
    const long double distance = std::abs(value_of(dtype, a) - value_of(dtype, b));
    if (std::isnan(distance)) {
      ++without_distance_numel;
    } else {
      largest = std::max(largest, distance);
    }
  }
}

}  // namespace zeropage::tools
