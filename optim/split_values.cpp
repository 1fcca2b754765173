#include "optim/split_values.h"

#include <limits>

#include <ATen/ATen.h>

namespace zeropage::optim {

SplitValues split_values(const at::Tensor& values) {
  const at::Tensor fp32 = values.to(at::kFloat).contiguous();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor bits = at::where(fp32.isnan(), kNaN, fp32).view(at::kInt);
  return {((bits + 0x8000).bitwise_right_shift(16)).to(at::kShort).view(at::kBFloat16),
          bits.to(at::kShort)};
}

at::Tensor joined_values(const at::Tensor& high, const at::Tensor& low) {
  const at::Tensor lower = low.to(at::kInt).bitwise_and(0xffff);
  const at::Tensor upper = high.view(at::kShort).to(at::kInt) - lower.bitwise_right_shift(15);
  return upper.bitwise_left_shift(16).bitwise_or(lower).view(at::kFloat);
}

}  // namespace zeropage::optim
