// A stretch of parameters as raw pointers: what the loops and kernels are given. Free of torch and
// of CUDA.
#pragma once

#include <cstdint>

#include "optim/low_precision.h"

namespace zeropage::optim {

enum class Precision : uint8_t { kFloat, kBFloat16, kHalf };

inline constexpr int kMostStates = 3;

// All pointers are to numel elements of one device; they do not overlap.
struct FlatStretch {
  float* values = nullptr;
  const void* gradient = nullptr;
  Precision gradient_precision = Precision::kFloat;
  void* gradient_to_zero = nullptr;  // the gradient, if it is zero afterwards; null: it is kept
  void* copy_out = nullptr;          // null: none
  Precision copy_precision = Precision::kBFloat16;
  // The copy is what was copied out last, but where somebody wrote to it since: there its elements
  // become the values, before anything else.
  bool adopts_copy = false;
  float* states[kMostStates] = {};
  int64_t numel = 0;
  float gradient_scale = 1;  // a factor on the gradient, before anything else
  // Where it points to a number that is not 0, nothing is changed, but for the gradient to zero.
  const float* found_inf = nullptr;
};

// Instead of a type of copy_out.
struct NoCopy {};
ZEROPAGE_ELEMENT void assign(NoCopy& /*to*/, float /*value*/) {}

// Calls visit.operator()<Element>() with the type of that precision.
template <typename Visit>
void visit_precision(Precision precision, Visit visit) {
  switch (precision) {
    case Precision::kFloat:
      return visit.template operator()<float>();
    case Precision::kBFloat16:
      return visit.template operator()<BFloat16Bits>();
    case Precision::kHalf:
      return visit.template operator()<HalfBits>();
  }
}

// Calls visit.operator()<Gradient, Copy>() with the types of the stretch.
template <typename Visit>
void visit_types(const FlatStretch& stretch, Visit visit) {
  visit_precision(stretch.gradient_precision, [&]<typename Gradient>() {
    if (stretch.copy_out == nullptr) {
      visit.template operator()<Gradient, NoCopy>();
    } else if (stretch.copy_precision == Precision::kBFloat16) {
      visit.template operator()<Gradient, BFloat16Bits>();
    } else {
      visit.template operator()<Gradient, HalfBits>();
    }
  });
}

}  // namespace zeropage::optim
