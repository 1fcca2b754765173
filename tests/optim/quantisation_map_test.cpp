#include "optim/quantisation_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "optim/cpu/quantised_loops.h"

namespace zeropage::optim::quantisation_map_test {
namespace {

using optim::cpu::Instructions;

constexpr auto kInfinity = std::numeric_limits<float>::infinity();
constexpr auto kNaN = std::numeric_limits<float>::quiet_NaN();

struct Quantised {
  float scale = 0;
  std::vector<uint8_t> codes;
};

Quantised quantised_block(StateSign sign, const std::vector<float>& values,
                          Instructions instructions = Instructions::kAvx512) {
  Quantised block{.codes = std::vector<uint8_t>(values.size())};
  block.scale =
      optim::cpu::quantised_loops(instructions)
          .quantise(sign, values.data(), block.codes.data(), static_cast<int64_t>(values.size()));
  return block;
}

std::vector<float> values_of(StateSign sign, const Quantised& block,
                             Instructions instructions = Instructions::kAvx512) {
  std::vector<float> values(block.codes.size());
  optim::cpu::quantised_loops(instructions)
      .dequantise(sign, block.codes.data(), block.scale, values.data(),
                  static_cast<int64_t>(values.size()));
  return values;
}

bool same_bits(const std::vector<float>& one, const std::vector<float>& other) {
  return one.size() == other.size() &&
         std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

// By how much of itself a number may be taken for another: the inverse of the scale, its product and the
// value of a code are rounded, which is 2 units of the last place together, and 2 bits of the power are
// cut off, which is 3. A unit is at most 2^-23.
constexpr float kTaken = 5.0F / (1 << 23);

class QuantisationMapTest : public ::testing::TestWithParam<StateSign> {
 protected:
  StateSign sign() const { return GetParam(); }
  bool is_signed() const { return sign() == StateSign::kSigned; }
  int level_bits() const { return is_signed() ? 7 : 8; }
  size_t top() const { return (size_t{1} << level_bits()) - 1; }
  // Levels of a factor of two that is so many below the scale; there may be less than one.
  double levels_of(int binade) const { return std::ldexp(1.0, level_bits() - 3 - binade / 4); }

  Quantised all_codes(float scale) const {
    Quantised all{.scale = scale, .codes = std::vector<uint8_t>(256)};
    std::iota(all.codes.begin(), all.codes.end(), uint8_t{0});
    return all;
  }

  // Magnitudes as a block can have them, also next to where powers of two and halves of levels meet.
  std::vector<float> random_block(std::mt19937_64& random) const {
    std::uniform_real_distribution<float> exponent(-34, 0);
    std::uniform_int_distribution<int> ulps(-20, 20);
    std::uniform_int_distribution<size_t> code(1, top());
    const auto levels = values_of(sign(), all_codes(1));
    std::vector<float> values;
    for (int i = 0; i < 256; ++i) {
      float value = std::exp2(exponent(random));
      if (i % 4 == 1) value = std::exp2(std::floor(std::log2(value)));
      if (i % 4 == 2) value = levels[code(random)];
      if (i % 4 == 3) {
        const size_t above = code(random);
        value = (levels[above - 1] + levels[above]) / 2;
      }
      if (i % 4 != 0) {
        value = optim::rounded::float_of(optim::rounded::bits_of(value) +
                                         static_cast<uint32_t>(ulps(random)));
      }
      value = std::min(value, 1.0F);
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

TEST_P(QuantisationMapTest, SpacesLevelsEvenlyInFactorsOfTwoAndHalvesThemEveryFactorOf16) {
  const auto values = values_of(sign(), all_codes(1));
  // Code 0 is where power 0 is not, so all are so much less.
  const double least = std::ldexp(1.0, -4 * level_bits());
  size_t code = top();
  for (int binade = 0; levels_of(binade) >= 1; ++binade) {
    const double spacing = std::ldexp(1.0, -binade - 1) / levels_of(binade);
    for (int level = 0; level < static_cast<int>(levels_of(binade)); ++level, --code) {
      const double expected = std::ldexp(1.0, -binade) - level * spacing;
      EXPECT_NEAR(values[code] + least, expected, 1e-6 * expected) << code;
    }
  }
  // Below, factors of two have less than a level.
  EXPECT_EQ(code, 3);
  EXPECT_NEAR(values[1], 15 * least, 1e-6 * least);
}

TEST_P(QuantisationMapTest, GivesEveryCodeBackAtAnyScale) {
  for (const float scale : {1.0F, 3.7F, 2.4e-38F, 3.4e38F, 1e-20F}) {
    const auto all = all_codes(scale);
    const auto again = quantised_block(sign(), values_of(sign(), all));
    EXPECT_EQ(again.scale, scale);
    // The lowest codes of the least scales are denormal numbers, which may be the same.
    if (scale > 1e-30F) {
      EXPECT_EQ(again.codes, all.codes) << scale;
    }
  }
}

TEST_P(QuantisationMapTest, TakesTheNearestLevelOfEveryNumber) {
  std::mt19937_64 random(1);
  const auto levels = values_of(sign(), all_codes(1));
  for (int trial = 0; trial < 200; ++trial) {
    const auto values = random_block(random);
    const auto codes = quantised_block(sign(), values).codes;
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t code = codes[i] & top();
      const float magnitude = std::abs(values[i]);
      EXPECT_EQ(is_signed() && std::signbit(values[i]), is_signed() && codes[i] > top());
      // Where levels lie a factor of 4 or 16 apart, what is near in their scale counts, which is straight
      // only within factors of two.
      if (code < 4) continue;
      const auto apart = [&](size_t other) { return std::abs(levels[other] - magnitude); };
      const float tolerance = 2 * kTaken * magnitude;
      EXPECT_LE(apart(code), apart(code - 1) + tolerance) << magnitude;
      if (code == top()) continue;
      EXPECT_LE(apart(code), apart(code + 1) + tolerance) << magnitude;
    }
  }
}

TEST_P(QuantisationMapTest, DiffersFromANumberByNoMoreThanItSays) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const auto values = random_block(random);
    const auto back = values_of(sign(), quantised_block(sign(), values));
    const double of_itself = is_signed() ? 1.0 / 32 : 1.0 / 64;
    for (size_t i = 0; i < values.size(); ++i) {
      const double magnitude = std::abs(values[i]);
      const double error = std::abs(static_cast<double>(back[i]) - values[i]);
      const int range = static_cast<int>(-std::log2(magnitude) / 4);
      const double rounding = kTaken * magnitude;
      EXPECT_LE(error, of_itself / 2 + rounding);
      if (range < 5) {
        EXPECT_LE(error, std::ldexp(of_itself, range) * magnitude + rounding) << magnitude;
      }
      const double least = std::ldexp(3.0, -4 * level_bits());
      if (magnitude < 0.999 * least || magnitude > 1.001 * least) {
        EXPECT_EQ(back[i] == 0, magnitude < least) << magnitude;
      }
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

TEST_P(QuantisationMapTest, MakesZeroOfABlockOfZerosOrOfTheLeastNumbers) {
  for (const float value : {0.0F, 1e-39F, 2.3e-38F}) {
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
}  // namespace zeropage::optim::quantisation_map_test
