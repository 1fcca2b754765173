// An fp32 number as a bf16 one and the 16 bits that remain. Free of torch and of CUDA.
//
// The bf16 is the number rounded to nearest, halves away from zero: then it is the number's upper 16
// bits, plus the topmost of the lower ones, and both together have exactly the number's bits. At a
// tie it may be another bf16 than the one to nearest even. A NaN becomes the one of low_precision.h;
// numbers that round to infinity come back too.
#pragma once

#include "optim/low_precision.h"

namespace zeropage::optim {

struct SplitValue {
  BFloat16Bits high;
  uint16_t low;
};

ZEROPAGE_ELEMENT SplitValue split(float value) {
  const uint32_t bits = optim::rounded::bits_of(value);
  const bool is_nan = (bits & 0x7fffffffU) > optim::detail::kInfinity;
  const uint32_t kept = is_nan ? 0x7fc00000U : bits;
  return {{static_cast<uint16_t>((kept + 0x8000U) >> 16)}, static_cast<uint16_t>(kept)};
}

ZEROPAGE_ELEMENT float joined(BFloat16Bits high, uint16_t low) {
  const uint32_t upper = static_cast<uint32_t>(high.bits) - (static_cast<uint32_t>(low) >> 15);
  return optim::rounded::float_of(upper << 16 | low);
}

}  // namespace zeropage::optim
