// The loops of every instruction set have the same bits, and are as close to fp64 as fp32 allows.
#include "fused/cpu/loops.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "tests/fused/drawn_elements.h"

namespace zeropage::fused::cpu::loops_test {
namespace {

using optim::cpu::Instructions;
using optim::cpu::instructions_of_processor;
using zeropage::testing::drawn_elements;

std::vector<Instructions> sets_here() {
  std::vector<Instructions> sets;
  for (const Instructions set :
       {Instructions::kAnyProcessor, Instructions::kAvx2, Instructions::kAvx512}) {
    if (set <= instructions_of_processor()) sets.push_back(set);
  }
  return sets;
}

// Not a multiple of sixteen.
constexpr int64_t kWidth = 77;
constexpr int64_t kRows = 5;

template <typename T>
void append(std::vector<unsigned char>& bytes, const std::vector<T>& values) {
  const auto* const first = reinterpret_cast<const unsigned char*>(values.data());
  bytes.insert(bytes.end(), first, first + values.size() * sizeof(T));
}

// What all loops of a set write.
template <typename T>
std::vector<unsigned char> everything(Instructions instructions) {
  const LoopsOf<T>& loops = loops_of<T>(instructions);
  constexpr int64_t kNumel = kRows * kWidth;
  const auto x = drawn_elements<T>(kNumel, 1), y = drawn_elements<T>(kNumel, 2),
             z = drawn_elements<T>(kNumel, 3), weight = drawn_elements<T>(kWidth, 4);
  const auto angles = drawn_elements<float>(kNumel, 5);
  std::vector<unsigned char> bytes;
  std::vector<T> first(x.size()), second(x.size());
  std::vector<float> means(kRows), inverses(kRows), of_weight(kWidth), of_bias(kWidth);

  first = x;
  for (int64_t row = 0; row < kRows; ++row) {
    const ExponentSum sum = loops.sum_exponents(x.data() + row * kWidth, kWidth);
    append(bytes, std::vector<double>{sum.largest, sum.sum});
    loops.to_probabilities(first.data() + row * kWidth, kWidth, sum.largest, 0.5F);
  }
  append(bytes, first);
  for (float* const centres : {means.data(), static_cast<float*>(nullptr)}) {
    loops.normalise({.width = kWidth,
                     .epsilon = 1e-5,
                     .input = x.data(),
                     .residual = y.data(),
                     .weight = weight.data(),
                     .bias = centres == nullptr ? nullptr : weight.data(),
                     .sum = second.data(),
                     .output = first.data(),
                     .means = centres,
                     .inverses = inverses.data()},
                    0, kRows);
    append(bytes, first);
    append(bytes, second);
    loops.norm_gradient({.width = kWidth,
                         .gradient = z.data(),
                         .gradient_of_sum = y.data(),
                         .sum = second.data(),
                         .weight = weight.data(),
                         .means = centres,
                         .inverses = inverses.data(),
                         .of_input = first.data()},
                        0, kRows, of_weight.data(), of_bias.data());
    append(bytes, first);
  }
  append(bytes, of_weight);
  append(bytes, of_bias);
  loops.rotate({.width = 38,
                .sizes = {1, 2, 2},
                .input_strides = {0, 38, 76},
                .output_strides = {0, 38, 76},
                .angle_strides = {0, 19},
                .input = x.data(),
                .cosines = angles.data(),
                .sines = angles.data() + 40,
                .output = first.data()},
               0, 4);
  append(bytes, first);
  loops.swiglu(x.data(), y.data(), first.data(), kNumel);
  append(bytes, first);
  loops.swiglu_gradient(z.data(), x.data(), y.data(), first.data(), second.data(), kNumel);
  append(bytes, first);
  append(bytes, second);
  for (const GeluForm form : {GeluForm::kExact, GeluForm::kTanh}) {
    loops.bias_gelu(form, x.data(), weight.data(), first.data(), kWidth);
    loops.bias_gelu_gradient(form, z.data(), x.data(), weight.data(), second.data(), of_bias.data(),
                             kWidth);
    append(bytes, first);
    append(bytes, second);
    append(bytes, of_bias);
  }
  return bytes;
}

TEST(FusedLoopsTest, HaveTheSameBitsWithEveryInstructionSet) {
  const auto expect_same = []<typename T>(T /*element*/) {
    const auto expected = everything<T>(Instructions::kAnyProcessor);
    for (const Instructions set : sets_here())
      EXPECT_EQ(everything<T>(set), expected) << name_of(set);
  };
  expect_same(float{});
  expect_same(optim::BFloat16Bits{});
  expect_same(optim::HalfBits{});
}

TEST(FusedLoopsTest, HaveExponentsThatAreRightFromTheLeastToTheLargest) {
  std::vector<float> x;
  for (float value = -87.3F; value < 0; value += 0.0137F) x.push_back(value);
  x.push_back(0);
  auto values = x;
  loops_of<float>().to_probabilities(values.data(), static_cast<int64_t>(x.size()), 0, 1);
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    ASSERT_NEAR(values[i], expected, 2.5e-7 * expected) << x[i];
  }
  std::vector<float> ends = {-88, -1000, -INFINITY, 88, -80};
  loops_of<float>().to_probabilities(ends.data(), 5, 0, 1);
  EXPECT_EQ(ends[0], 0);
  EXPECT_EQ(ends[1], 0);
  EXPECT_EQ(ends[2], 0);
  EXPECT_NEAR(ends[3], std::exp(88.0), 3e-7 * std::exp(88.0));
}

TEST(FusedLoopsTest, KeepWhatIsNoNumber) {
  std::vector<float> row = {1, NAN, 2};
  EXPECT_TRUE(std::isnan(loops_of<float>().sum_exponents(row.data(), 3).sum));
  row = {1, INFINITY, 2};
  EXPECT_TRUE(std::isnan(loops_of<float>().sum_exponents(row.data(), 3).sum))
      << "as LibTorch's softmax has it";
  row = {-INFINITY, 0, -INFINITY};
  EXPECT_EQ(loops_of<float>().sum_exponents(row.data(), 3).sum, 1);
  std::vector<float> one(3, 1), result(3);
  row = {NAN, INFINITY, -INFINITY};
  loops_of<float>().swiglu(row.data(), one.data(), result.data(), 3);
  EXPECT_TRUE(std::isnan(result[0]));
  EXPECT_EQ(result[1], INFINITY);
}

// The sum of 49,152 numbers of one size has 16 bits more than each.
TEST(FusedLoopsTest, AddUpALargeVocabularyToFp32sPrecision) {
  auto row = drawn_elements<float>(49152, 9);
  const ExponentSum sum = loops_of<float>().sum_exponents(row.data(), 49152);
  double expected = 0;
  for (const float value : row)
    expected += std::exp(static_cast<double>(value) - static_cast<double>(sum.largest));
  EXPECT_NEAR(sum.sum, expected, 2e-7 * expected);
}

}  // namespace
}  // namespace zeropage::fused::cpu::loops_test
