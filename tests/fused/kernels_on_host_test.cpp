// The CUDA kernels of the fused operators, run on the host, beside the loops of the CPU: close, in both orders of threads, with any number
// of processors.
#include <cmath>
#include <cstdint>
#include <cuda_runtime.h>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "fused/cpu/loops.h"
#include "fused/cuda/rows.h"
#include "tests/fused/drawn_elements.h"

namespace zeropage::fused::kernels_on_host_test {
namespace {

using namespace zeropage::testing;
using lockstep::Order;

constexpr int64_t kRows = 7, kWidth = 301;  // more than a block's threads, and no multiple

// relative: of the largest.
template <typename T>
void expect_near(const std::vector<T>& expected, const std::vector<T>& got, double relative,
                 const char* what) {
  float most = 0;
  for (const T value : expected) most = std::max(most, std::abs(optim::to_float(value)));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(optim::to_float(got[i]), optim::to_float(expected[i]), relative * most)
        << what << " " << i;
  }
}

// Sums of 301 numbers in another order; a rounding to T more or less.
template <typename T>
constexpr double kClose = std::is_same_v<T, float>             ? 2e-6
                          : std::is_same_v<T, optim::HalfBits> ? 0x1p-10
                                                               : 0x1p-7;

std::vector<float> sum_of_parts(const std::vector<float>& parts, int64_t count) {
  std::vector<float> sum(parts.size() / static_cast<size_t>(count));
  for (size_t i = 0; i < parts.size(); ++i) sum[i % sum.size()] += parts[i];
  return sum;
}

template <typename T>
class FusedKernelsOnHostTest : public ::testing::Test {
 protected:
  void TearDown() override { cuda_on_host::device = {}; }

  // In both orders, on one processor and on more.
  template <typename Check>
  static void everywhere(const Check& check) {
    for (const Order order : {Order::kForward, Order::kBackward}) {
      for (const int processors : {1, 3}) {
        cuda_on_host::device = {.processors = processors, .order = order};
        check();
      }
    }
  }

  const cpu::LoopsOf<T>& loops = cpu::loops_of<T>();
  const std::vector<T> x = drawn_elements<T>(kRows * kWidth, 1),
                       y = drawn_elements<T>(kRows * kWidth, 2),
                       z = drawn_elements<T>(kRows * kWidth, 3),
                       weight = drawn_elements<T>(kWidth, 4), bias = drawn_elements<T>(kWidth, 5);
};

using Elements = ::testing::Types<float, optim::BFloat16Bits, optim::HalfBits>;
TYPED_TEST_SUITE(FusedKernelsOnHostTest, Elements);

TYPED_TEST(FusedKernelsOnHostTest, NormaliseAsTheLoopsDo) {
  using T = TypeParam;
  this->everywhere([&] {
    for (const bool centred : {false, true}) {
      for (const bool added : {false, true}) {
        struct Results {
          std::vector<T> sum, output, of_input;
          std::vector<float> means, inverses;
        };
        const auto made = [&](Results& to) {
          to.sum = this->x;
          to.output.resize(this->x.size());
          to.of_input.resize(this->x.size());
          to.means.resize(kRows);
          to.inverses.resize(kRows);
          return NormRows<T>{.width = kWidth,
                             .epsilon = 1e-5,
                             .input = this->x.data(),
                             .residual = added ? this->y.data() : nullptr,
                             .weight = this->weight.data(),
                             .bias = centred ? this->bias.data() : nullptr,
                             .sum = added ? to.sum.data() : nullptr,
                             .output = to.output.data(),
                             .means = centred ? to.means.data() : nullptr,
                             .inverses = to.inverses.data()};
        };
        Results expected, got;
        this->loops.normalise(made(expected), 0, kRows);
        cuda::normalise(made(got), kRows, nullptr);
        expect_near(expected.sum, got.sum, 0, "sum");
        expect_near(expected.output, got.output, kClose<T>, "output");
        expect_near(expected.inverses, got.inverses, 1e-6, "inverses");
        if (centred) expect_near(expected.means, got.means, 1e-5, "means");

        const auto gradient = [&](Results& of) {
          return NormGradientRows<T>{.width = kWidth,
                                     .gradient = this->z.data(),
                                     .gradient_of_sum = added ? this->y.data() : nullptr,
                                     .sum = expected.sum.data(),
                                     .weight = this->weight.data(),
                                     .means = centred ? expected.means.data() : nullptr,
                                     .inverses = expected.inverses.data(),
                                     .of_input = of.of_input.data()};
        };
        constexpr int64_t kParts = 3;
        std::vector<float> of_weight(kWidth), of_bias(kWidth), weight_parts(kParts * kWidth),
            bias_parts(kParts * kWidth);
        this->loops.norm_gradient(gradient(expected), 0, kRows, of_weight.data(), of_bias.data());
        cuda::norm_gradient(gradient(got), kRows, kParts, weight_parts.data(),
                            centred ? bias_parts.data() : nullptr, nullptr);
        expect_near(expected.of_input, got.of_input, kClose<T>, "of_input");
        expect_near(of_weight, sum_of_parts(weight_parts, kParts), 1e-5, "of_weight");
        if (centred) expect_near(of_bias, sum_of_parts(bias_parts, kParts), 1e-5, "of_bias");
      }
    }
  });
}

TYPED_TEST(FusedKernelsOnHostTest, RotateAndGateAsTheLoopsDo) {
  using T = TypeParam;
  const auto angles = drawn_elements<float>(kRows * kWidth, 6);
  this->everywhere([&] {
    const auto rotary = [&](std::vector<T>& to) {
      to.assign(this->x.size(), T{});
      return RotaryRows<T>{.width = 38,
                           .sizes = {2, 3, 5},
                           .input_strides = {3 * 5 * 38, 38, 3 * 38},
                           .output_strides = {3 * 5 * 38, 5 * 38, 38},
                           .angle_strides = {5 * 19, 19},
                           .input = this->x.data(),
                           .cosines = angles.data(),
                           .sines = angles.data() + 200,
                           .direction = -1,
                           .output = to.data()};
    };
    std::vector<T> expected, got;
    this->loops.rotate(rotary(expected), 0, 30);
    cuda::rotate(rotary(got), 30, nullptr);
    expect_near(expected, got, kClose<T>, "rotary");

    const auto numel = static_cast<int64_t>(this->x.size());
    this->loops.swiglu(this->x.data(), this->y.data(), expected.data(), numel);
    cuda::swiglu(this->x.data(), this->y.data(), got.data(), numel, nullptr);
    expect_near(expected, got, kClose<T>, "swiglu");
    std::vector<T> expected_value(this->x.size()), got_value(this->x.size());
    this->loops.swiglu_gradient(this->z.data(), this->x.data(), this->y.data(), expected.data(),
                                expected_value.data(), numel);
    cuda::swiglu_gradient(this->z.data(), this->x.data(), this->y.data(), got.data(),
                          got_value.data(), numel, nullptr);
    expect_near(expected, got, kClose<T>, "of gate");
    expect_near(expected_value, got_value, kClose<T>, "of value");

    for (const GeluForm form : {GeluForm::kExact, GeluForm::kTanh}) {
      constexpr int64_t kParts = 2;
      std::vector<float> of_bias(kWidth), parts(kParts * kWidth);
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t at = row * kWidth;
        this->loops.bias_gelu(form, this->x.data() + at, this->bias.data(), expected.data() + at,
                              kWidth);
        this->loops.bias_gelu_gradient(form, this->z.data() + at, this->x.data() + at,
                                       this->bias.data(), expected_value.data() + at,
                                       of_bias.data(), kWidth);
      }
      cuda::bias_gelu(form, this->x.data(), this->bias.data(), got.data(), kRows, kWidth, nullptr);
      cuda::bias_gelu_gradient(form, this->z.data(), this->x.data(), this->bias.data(),
                               got_value.data(), parts.data(), kRows, kWidth, kParts, nullptr);
      expect_near(expected, got, kClose<T>, "gelu");
      expect_near(expected_value, got_value, kClose<T>, "of input");
      expect_near(of_bias, sum_of_parts(parts, kParts), 1e-5, "of bias");
    }
  });
}

TYPED_TEST(FusedKernelsOnHostTest, TurnLogitsIntoGradientsAsTheLoopsDo) {
  using T = TypeParam;
  // The classes from 100 on are this rank's; one target is another's, one is ignored.
  constexpr int64_t kFirst = 100, kIgnored = -100;
  const std::vector<int64_t> targets = {100, 400, 37, kIgnored, 150, 222, 399};
  this->everywhere([&] {
    std::vector<T> logits = this->x;
    const cuda::LogitTile<T> tile{.logits = logits.data(),
                                  .targets = targets.data(),
                                  .rows = kRows,
                                  .columns = kWidth,
                                  .first_class = kFirst,
                                  .ignore_index = kIgnored};
    std::vector<float> figures(3 * kRows);
    cuda::sum_exponents(tile, figures.data(), nullptr);
    cuda::to_gradients(tile, figures.data(), figures.data(), nullptr);
    std::vector<T> expected = this->x;
    for (int64_t row = 0; row < kRows; ++row) {
      T* const of_row = expected.data() + row * kWidth;
      const ExponentSum sum = this->loops.sum_exponents(of_row, kWidth);
      const auto target = targets[static_cast<size_t>(row)];
      const int64_t own = target - kFirst;
      const bool is_here = own >= 0 && own < kWidth;
      EXPECT_EQ(figures[static_cast<size_t>(row)], sum.largest);
      EXPECT_NEAR(figures[static_cast<size_t>(kRows + row)], sum.sum, 2e-6 * sum.sum);
      const float of_target = figures[static_cast<size_t>(2 * kRows + row)];
      EXPECT_EQ(of_target, is_here ? optim::to_float(of_row[own]) - sum.largest
                                   : -std::numeric_limits<float>::infinity());
      this->loops.to_probabilities(of_row, kWidth, sum.largest,
                                   static_cast<float>(target == kIgnored ? 0 : 1 / sum.sum));
      if (is_here) set(of_row[own], static_cast<float>(std::exp(double{of_target}) / sum.sum - 1));
    }
    expect_near(expected, logits, kClose<T>, "gradient");
  });
}

TEST(FusedKernelsOnHostNumbersTest, KeepWhatIsNoNumber) {
  const int64_t target = 0;
  const auto sum_of = [&](std::vector<float> row) {
    std::vector<float> figures(3);
    cuda::sum_exponents(
        cuda::LogitTile<float>{.logits = row.data(), .targets = &target, .rows = 1, .columns = 3},
        figures.data(), nullptr);
    return figures[1];
  };
  EXPECT_TRUE(std::isnan(sum_of({1, NAN, 2})));
  EXPECT_EQ(sum_of({-INFINITY, 0, -INFINITY}), 1);
  cuda_on_host::device = {};
}

}  // namespace
}  // namespace zeropage::fused::kernels_on_host_test
