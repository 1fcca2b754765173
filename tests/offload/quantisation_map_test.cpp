#include "offload/quantisation_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "offload/cpu/quantised_block.h"

namespace zeropage::offload::quantisation_map_test {
namespace {

using cpu::Instructions;

constexpr auto kInfinity = std::numeric_limits<float>::infinity();
constexpr auto kNaN = std::numeric_limits<float>::quiet_NaN();

struct Quantised {
  float scale = 0;
  std::vector<uint8_t> codes;
};

Quantised quantised_block(StateSign sign, const std::vector<float>& values,
                          Instructions instructions = Instructions::kAvx512) {
  Quantised block{.codes = std::vector<uint8_t>(values.size())};
  block.scale = cpu::quantise(sign, values.data(), block.codes.data(),
                              static_cast<int64_t>(values.size()), instructions);
  return block;
}

std::vector<float> values_of(StateSign sign, const Quantised& block,
                             Instructions instructions = Instructions::kAvx512) {
  std::vector<float> values(block.codes.size());
  cpu::dequantise(sign, block.codes.data(), block.scale, values.data(),
                  static_cast<int64_t>(values.size()), instructions);
  return values;
}

bool same_bits(const std::vector<float>& one, const std::vector<float>& other) {
  return one.size() == other.size() &&
         std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

class QuantisationMapTest : public ::testing::TestWithParam<StateSign> {
 protected:
  StateSign sign() const { return GetParam(); }
  bool is_signed() const { return sign() == StateSign::kSigned; }
  int decades() const { return is_signed() ? 7 : 8; }
  size_t top() const { return (size_t{1} << decades()) - 1; }

  Quantised all_codes(float scale) const {
    Quantised all{.scale = scale, .codes = std::vector<uint8_t>(256)};
    std::iota(all.codes.begin(), all.codes.end(), uint8_t{0});
    return all;
  }

  // Of all magnitudes that a block can have, also next to where decades meet.
  std::vector<float> random_block(std::mt19937_64& random) const {
    std::uniform_real_distribution<double> exponent(-10, 0);
    std::uniform_int_distribution<int> ulps(-20, 20);
    std::vector<float> values;
    for (int i = 0; i < 256; ++i) {
      auto value = static_cast<float>(std::pow(10.0, exponent(random)));
      if (i % 2 == 0) {
        const double meeting = 1 / (0.1 + 0.9 * (1 - std::pow(2.0, -decades())));
        value = static_cast<float>(meeting * std::pow(10.0, -(1 + i / 2 % 8)));
        value = rounded::float_of(rounded::bits_of(value) + static_cast<uint32_t>(ulps(random)));
      }
      values.push_back(is_signed() && i % 3 == 0 ? -value : value);
    }
    values[17] = 1;
    return values;
  }
};

INSTANTIATE_TEST_SUITE_P(Signs, QuantisationMapTest,
                         ::testing::Values(StateSign::kSigned, StateSign::kUnsigned),
                         [](const auto& info) {
                           return info.param == StateSign::kSigned ? "Signed" : "Unsigned";
                         });

TEST_P(QuantisationMapTest, RisesFromZeroToTheScaleItself) {
  const auto values = values_of(sign(), all_codes(3.7F));
  EXPECT_EQ(values[0], 0);
  for (size_t code = 1; code <= top(); ++code) EXPECT_GT(values[code], values[code - 1]) << code;
  EXPECT_EQ(values[top()], 3.7F);
  for (size_t code = 1; is_signed() && code <= top(); ++code) {
    EXPECT_EQ(values[128 + code], -values[code]) << code;
  }
}

TEST_P(QuantisationMapTest, CutsDecadesIntoTwiceAsManyBinsAsTheOneBelow) {
  const auto values = values_of(sign(), all_codes(1));
  for (int decade = 1; decade < decades(); ++decade) {
    const auto first = size_t{1} << decade;
    const double bin = 0.9 * std::pow(10.0, decade - decades() + 1) / static_cast<double>(first) /
                       (0.1 + 0.9 * (1 - std::pow(2.0, -decades())));
    for (size_t code = first; code + 1 < 2 * first; ++code) {
      EXPECT_NEAR(values[code + 1] - values[code], bin, 1e-3 * bin) << code;
    }
  }
}

TEST_P(QuantisationMapTest, GivesEveryCodeBackAtAnyScale) {
  for (const float scale : {1.0F, 3.7F, 1.2e-38F, 3.4e38F, 1e-20F}) {
    const auto all = all_codes(scale);
    const auto again = quantised_block(sign(), values_of(sign(), all));
    EXPECT_EQ(again.scale, scale);
    // The lowest codes of the least scales are denormal numbers, which may be the same.
    if (scale > 1e-30F) {
      EXPECT_EQ(again.codes, all.codes) << scale;
    }
  }
}

TEST_P(QuantisationMapTest, StaysWithinHalfABinOfEveryNumber) {
  std::mt19937_64 random(1);
  const double range = std::pow(10.0, 1 - decades() - 1);
  for (int trial = 0; trial < 200; ++trial) {
    auto values = random_block(random);
    const auto back = values_of(sign(), quantised_block(sign(), values));
    const double scale = *std::max_element(back.begin(), back.end());
    for (size_t i = 0; i < values.size(); ++i) {
      const double relative = std::abs(values[i]) / scale;
      const double error = std::abs(back[i] - values[i]) / scale;
      // Half of a bin of the number's own decade, or all of a number below all of them.
      const double decade = std::floor(std::log10(relative + kLeastRelative) + decades() + 1e-3);
      const double half_bin =
          0.45 * std::pow(10.0, decade - decades() + 1) / std::pow(2.0, decade) * 1.02;
      EXPECT_LE(error, decade < 0 ? range * 1.02 : half_bin) << values[i] << " " << back[i];
    }
  }
}

TEST_P(QuantisationMapTest, KeepsTheLargestOfABlockForAnyNumberOfSteps) {
  std::vector<float> values(256, 0.3F);
  values[5] = 0.7654321F;
  for (int step = 0; step < 1000; ++step) {
    values = values_of(sign(), quantised_block(sign(), values));
  }
  EXPECT_EQ(values[5], 0.7654321F);
  EXPECT_NEAR(values[6], 0.3F, 0.3F / 64);
}

TEST_P(QuantisationMapTest, MakesZeroOfABlockOfZerosOrOfDenormals) {
  for (const float value : {0.0F, 1e-39F}) {
    const auto block = quantised_block(sign(), std::vector<float>(100, value));
    EXPECT_EQ(block.scale, 0);
    EXPECT_TRUE(same_bits(values_of(sign(), block), std::vector<float>(100, 0.0F)));
  }
}

TEST_P(QuantisationMapTest, MakesABlockWithANumberThatIsNotFiniteNaNAltogether) {
  for (const float odd : {kInfinity, kNaN}) {
    std::vector<float> values(256, 0.5F);
    values[200] = odd;
    for (const float value : values_of(sign(), quantised_block(sign(), values))) {
      EXPECT_TRUE(std::isnan(value));
    }
  }
}

TEST_P(QuantisationMapTest, HasTheSameBitsForEverySetOfInstructions) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 300; ++trial) {
    auto values = random_block(random);
    values.resize(trial % 2 == 0 ? 256 : static_cast<size_t>(18 + trial % 230));
    const auto expected = quantised_block(sign(), values, Instructions::kAnyProcessor);
    const auto expected_values = values_of(sign(), expected, Instructions::kAnyProcessor);
    for (const auto instructions : {Instructions::kAvx2, Instructions::kAvx512}) {
      const auto actual = quantised_block(sign(), values, instructions);
      EXPECT_EQ(actual.scale, expected.scale);
      EXPECT_EQ(actual.codes, expected.codes);
      EXPECT_TRUE(same_bits(values_of(sign(), expected, instructions), expected_values));
    }
  }
}

}  // namespace
}  // namespace zeropage::offload::quantisation_map_test
