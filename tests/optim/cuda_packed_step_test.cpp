// Packed steps of CUDA against those of the CPU: the same bits, in every format.
#include <gtest/gtest.h>

#include "tests/harness/needs_cuda.h"
#include "tests/optim/packed_cases.h"

namespace zeropage::optim::cuda_packed_step_test {
namespace {

using namespace zeropage::testing;
using namespace packed_cases;

class CudaPackedStepTest : public NeedsCuda<> {
 protected:
  // On the device, each tensor `shift` elements into another.
  static Stretch on_cuda(const Stretch& stretch, int64_t shift = 0) {
    return map_packed(stretch, [&](const torch::Tensor& tensor) {
      const auto options = tensor.options().device(at::kCUDA);
      const auto part =
          torch::zeros({tensor.numel() + shift}, options).narrow(0, shift, tensor.numel());
      part.copy_(tensor);
      return part;
    });
  }

  // Two steps of both from the same beginning, each with its gradient.
  static void expect_the_same_bits(const AnyOptions& options, const Stretch& before, int64_t shift,
                                   at::ScalarType dtype, const GradientFactors& factors) {
    Stretch expected = copy_of_packed(before);
    expected.gradient = expected.gradient.to(dtype);
    const Stretch actual = on_cuda(expected, shift);
    for (int64_t number = 1; number <= 2; ++number) {
      const auto seed = static_cast<uint64_t>(10 + number);
      expected.gradient.copy_(random_numbers(expected.gradient.numel(), seed));
      actual.gradient.copy_(expected.gradient);
      step(options, number, expected, factors);
      step(options, number, actual, factors);
    }
    EXPECT_TRUE(same_packed_bits(expected, actual)) << "shifted by " << shift;
    EXPECT_TRUE(same_bits_of(expected.gradient, actual.gradient));
  }
};

TEST_F(CudaPackedStepTest, HasTheCpusBitsInEveryFormatAndGradientDtype) {
  for_each_case([&](const AnyOptions& options, const Format& format) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(c10::toString(dtype));
      const Stretch before = packed_stretch(options, format, 5000, /*first_in_block=*/0);
      expect_the_same_bits(options, before, 0, dtype, {.scale = 0.7});
    }
  });
}

TEST_F(CudaPackedStepTest, HasThemAtAnyNumelPlaceAndAlignment) {
  for_each_case([&](const AnyOptions& options, const Format& format) {
    for (const int64_t numel : {1, 8, 255, 257, 3001}) {
      for (const int64_t first : {0, 8, 77, 255}) {
        SCOPED_TRACE(::testing::Message() << numel << " from " << first);
        const Stretch before = packed_stretch(options, format, numel, first);
        expect_the_same_bits(options, before, first % 8, at::kFloat, {});
      }
    }
  });
}

TEST_F(CudaPackedStepTest, HasThemOverMoreBlocksThanAGridHas) {
  const torch::optim::AdamWOptions options(0.01);
  for (const Format& format : all_formats()) {
    const Stretch before = packed_stretch(options, format, 30000003);
    expect_the_same_bits(options, before, 0, at::kBFloat16, {});
  }
}

TEST_F(CudaPackedStepTest, CopiesValuesOutInLowerPrecisions) {
  const torch::optim::AdamWOptions options(0.01);
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      Stretch expected = packed_stretch(options, {format, Values::kFp32});
      expected.copy_out = torch::zeros({kPackedNumel}, dtype);
      const Stretch actual = on_cuda(expected);
      step(options, 1, expected);
      step(options, 1, actual);
      EXPECT_TRUE(same_bits_of(expected.copy_out, actual.copy_out));
      EXPECT_TRUE(same_packed_bits(expected, actual));
    }
  }
}

TEST_F(CudaPackedStepTest, ZeroesTheGradientAndChangesNothingElseWhereFoundInfIsSet) {
  for_each_case([&](const AnyOptions& options, const Format& format) {
    for (const int64_t first : {0, 77}) {
      const Stretch before = packed_stretch(options, format, kPackedNumel, first);
      expect_the_same_bits(options, before, 0, at::kHalf, {.after = GradientAfter::kZeroed});
      const Stretch actual = on_cuda(before);
      step(options, 1, actual,
           {.found_inf = torch::ones({1}, at::kCUDA), .after = GradientAfter::kZeroed});
      EXPECT_TRUE(same_packed_bits(before, actual));
      EXPECT_FALSE(actual.gradient.any().item<bool>());
    }
  });
}

}  // namespace
}  // namespace zeropage::optim::cuda_packed_step_test
