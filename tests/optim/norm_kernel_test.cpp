// The kernel that adds the squares of a gradient's parts exactly, run on the host: the digits against a
// sum of the single bits of each square, and of what the loops of the CPU give.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cuda_runtime.h>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "optim/cpu/flat_norm.h"
#include "optim/cuda/flat_norm.h"
#include "optim/norm_part.h"

namespace zeropage::optim::norm_kernel_test {
namespace {

using testing::cuda_on_host::device;
using testing::lockstep::Order;

// The sums, each with its digits carried, and which flags are set.
struct Outcome {
  std::vector<std::array<uint64_t, kExactWords>> sums;
  std::vector<bool> flags;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

struct Case {
  int64_t sums = 1;
  int64_t flags = 1;
  std::vector<NormPart> parts;  // by sum, as the table has them
};

std::vector<NormRange> ranges_of(Case& of) {
  std::vector<NormRange> ranges(static_cast<size_t>(of.sums));
  for (size_t i = 0; i < of.parts.size(); ++i) {
    NormRange& range = ranges[static_cast<size_t>(of.parts[i].sum)];
    if (range.parts++ == 0) range.first_part = static_cast<int64_t>(i);
    of.parts[i].first_block = range.blocks;
    range.blocks += parts_of<int64_t>(of.parts[i].numel, kBlockNumel);
  }
  return ranges;
}

template <typename Element>
Outcome by_kernel(const std::vector<Element>& flat, Case of) {
  const std::vector<NormRange> ranges = ranges_of(of);
  int64_t most_blocks = 0;
  for (const NormRange& range : ranges) most_blocks = std::max(most_blocks, range.blocks);
  std::vector<uint64_t> words(
      static_cast<size_t>(of.sums * kExactWords + parts_of(of.flags, kFlagsPerWord)));
  optim::cuda::add_norm_parts(flat.data(), of.parts.data(), ranges.data(), most_blocks,
                              {.first = words.data(), .sums = of.sums}, nullptr);
  Outcome outcome;
  for (int64_t sum = 0; sum < of.sums; ++sum) {
    auto& digits = outcome.sums.emplace_back();
    std::copy_n(words.begin() + sum * kExactWords, kExactWords, digits.begin());
    for (size_t digit = 0; digit + 1 < kExactDigits; ++digit) {
      digits[digit + 1] += digits[digit] >> kDigitBits;
      digits[digit] &= kDigitMask;
    }
  }
  for (int64_t flag = 0; flag < of.flags; ++flag) {
    const uint64_t word = words[static_cast<size_t>(of.sums * kExactWords + flag / kFlagsPerWord)];
    outcome.flags.push_back((word >> flag % kFlagsPerWord & 1U) != 0);
  }
  return outcome;
}

// How often each bit of fp64, from 2^-1074 on, was added.
using Bits = std::array<uint64_t, kExactDigits * kDigitBits>;

void add_bits(double term, Bits& bits) {
  int exponent = 0;
  auto mantissa = static_cast<uint64_t>(std::ldexp(std::frexp(term, &exponent), 53));
  for (int place = exponent - 53 + 1074; mantissa != 0; ++place, mantissa >>= 1) {
    if ((mantissa & 1U) != 0) ++bits.at(static_cast<size_t>(place));
  }
}

std::array<uint64_t, kExactWords> digits_of(Bits bits) {
  std::array<uint64_t, kExactWords> digits{};
  for (size_t place = 0; place < bits.size(); ++place) {
    if (place + 1 < bits.size()) bits[place + 1] += bits[place] / 2;
    digits[place / kDigitBits] |= (bits[place] % 2) << place % kDigitBits;
  }
  return digits;
}

double square_of(double element) {
  return element * element;
}
template <typename Bits>
double square_of(Bits element) {
  return square_of(static_cast<double>(to_float(element)));
}

// Square by square.
template <typename Element>
Outcome by_bits(const std::vector<Element>& flat, const Case& of) {
  Outcome outcome{.sums = {}, .flags = std::vector<bool>(static_cast<size_t>(of.flags))};
  for (int64_t sum = 0; sum < of.sums; ++sum) {
    Bits bits{};
    uint64_t infinities = 0;
    uint64_t nans = 0;
    for (const NormPart& part : of.parts) {
      if (part.sum != sum) continue;
      for (int64_t i = part.begin; i < part.begin + part.numel; ++i) {
        const double square = square_of(flat[static_cast<size_t>(i)]);
        infinities += std::isinf(square) ? 1 : 0;
        nans += std::isnan(square) ? 1 : 0;
        if (!std::isfinite(square)) outcome.flags[static_cast<size_t>(part.flag)] = true;
        if (std::isfinite(square)) add_bits(square, bits);
      }
    }
    outcome.sums.push_back(digits_of(bits));
    outcome.sums.back()[kInfinitiesWord] = infinities;
    outcome.sums.back()[kNansWord] = nans;
  }
  return outcome;
}

template <typename Element>
Outcome by_loops(const std::vector<Element>& flat, const Case& of,
                 optim::cpu::Instructions instructions) {
  Outcome outcome{.sums = {}, .flags = std::vector<bool>(static_cast<size_t>(of.flags))};
  std::vector<ExactDigits> sums(static_cast<size_t>(of.sums));
  for (const NormPart& part : of.parts) {
    if (!optim::cpu::add_squares(flat.data(), part.begin, part.begin + part.numel,
                                 sums[static_cast<size_t>(part.sum)], instructions)) {
      outcome.flags[static_cast<size_t>(part.flag)] = true;
    }
  }
  for (ExactDigits& sum : sums) {
    sum.carry();
    std::copy_n(sum.words, kExactWords, outcome.sums.emplace_back().begin());
  }
  return outcome;
}

template <typename Element>
Element element_of(double value) {
  if constexpr (std::is_floating_point_v<Element>) {
    return static_cast<Element>(value);
  } else {
    Element element;
    assign(element, static_cast<float>(value));
    return element;
  }
}

// Numbers of all sizes that the precision has; now and then one is 0.
template <typename Element>
std::vector<Element> numbers(size_t count, uint64_t seed, int least_exponent, int most_exponent) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<int> exponents(least_exponent, most_exponent);
  std::uniform_real_distribution<double> mantissas(-2, 2);
  std::vector<Element> flat;
  for (size_t i = 0; i < count; ++i) {
    const double value = i % 7 == 3 ? 0 : std::ldexp(mantissas(random), exponents(random));
    flat.push_back(element_of<Element>(value));
  }
  return flat;
}

// Parts of any length, cut where a page's parameters are, with gaps, dealt out to sums and flags.
Case parts_over(int64_t numel, int64_t sums, int64_t flags, uint64_t seed) {
  std::mt19937_64 random(seed);
  Case of{.sums = sums, .flags = flags, .parts = {}};
  const std::array<int64_t, 8> lengths = {1, 7, 255, 256, 257, 512, 3001, 20000};
  for (int64_t begin = 0, flag = 0; begin < numel; ++flag) {
    const auto length = std::min(lengths[random() % lengths.size()], numel - begin);
    of.parts.push_back({.begin = begin,
                        .numel = length,
                        .sum = static_cast<int64_t>(random() % static_cast<uint64_t>(sums)),
                        .flag = flag % flags});
    begin += length + static_cast<int64_t>(random() % 3);
  }
  std::stable_sort(of.parts.begin(), of.parts.end(),
                   [](const NormPart& a, const NormPart& b) { return a.sum < b.sum; });
  return of;
}

template <typename Element>
class NormKernelTest : public ::testing::Test {
 protected:
  void TearDown() override { device = {}; }

  // By the loops of each instruction set; in both orders of threads, and on devices of several sizes.
  static void expect_the_squares(const std::vector<Element>& flat, const Case& of) {
    const Outcome expected = by_bits(flat, of);
    for (const auto instructions :
         {optim::cpu::Instructions::kAnyProcessor, optim::cpu::Instructions::kAvx2,
          optim::cpu::Instructions::kAvx512}) {
      EXPECT_TRUE(by_loops(flat, of, instructions) == expected)
          << flat.size() << " elements, instructions " << static_cast<int>(instructions);
    }
    for (const Order order : {Order::kForward, Order::kBackward}) {
      for (const int processors : {1, 5}) {
        device = {.processors = processors, .order = order};
        EXPECT_TRUE(by_kernel(flat, of) == expected)
            << flat.size() << " elements, " << of.parts.size() << " parts, " << of.sums << " sums";
      }
    }
  }

  static constexpr bool kIsWide = std::is_same_v<Element, double>;
  static constexpr int kLeast = kIsWide ? -560 : std::is_same_v<Element, HalfBits> ? -25 : -150;
  static constexpr int kMost = kIsWide ? 500 : std::is_same_v<Element, HalfBits> ? 14 : 126;
};

using Elements = ::testing::Types<double, float, BFloat16Bits, HalfBits>;
TYPED_TEST_SUITE(NormKernelTest, Elements);

TYPED_TEST(NormKernelTest, AddsEachSquareForAnyCutsSumsAndFlags) {
  uint64_t seed = 1;
  for (const int64_t numel : {1, 255, 257, 1500, 40001}) {
    // What no window holds is added element by element, which takes long in lockstep.
    const bool is_wide = numel < 2000;
    const auto flat = numbers<TypeParam>(static_cast<size_t>(numel), seed,
                                         is_wide ? this->kLeast : -6, is_wide ? this->kMost : 6);
    for (const auto& [sums, flags] : {std::pair<int64_t, int64_t>{1, 1}, {1, 100}, {3, 33}}) {
      this->expect_the_squares(flat, parts_over(numel, sums, flags, ++seed));
    }
  }
}

TYPED_TEST(NormKernelTest, AddsOnePartOfManyBlocks) {
  const auto flat = numbers<TypeParam>(200003, 3, -4, 4);
  this->expect_the_squares(flat, {.parts = {{.begin = 3, .numel = 200000}}});
}

// Numbers whose squares no window holds beside each other: a few that are small beside the others, and
// blocks that are large and small in turns.
TYPED_TEST(NormKernelTest, AddsWhatIsSmallBesideTheOthersToo) {
  const int far = std::is_same_v<TypeParam, HalfBits> ? 24 : 60;
  std::vector<TypeParam> flat;
  std::mt19937_64 random(8);
  std::uniform_real_distribution<double> mantissas(1, 2);
  constexpr int kThird = 1024;
  for (int i = 0; i < 3 * kThird; ++i) {
    const bool is_small = i < kThird ? i % 97 == 0 : i < 2 * kThird ? i / 256 % 2 == 0 : i % 2 == 0;
    flat.push_back(element_of<TypeParam>(std::ldexp(mantissas(random), is_small ? 10 - far : 10)));
  }
  this->expect_the_squares(flat, {.parts = {{.begin = 0, .numel = 3 * kThird}}});
  this->expect_the_squares(flat, parts_over(3 * kThird, 2, 3, 9));
}

// Each exponent that a window's least number may have, and the next ones on both sides.
TYPED_TEST(NormKernelTest, IsExactAtTheEdgesOfAWindow) {
  std::mt19937_64 random(10);
  std::uniform_real_distribution<double> mantissas(1, 2);
  constexpr int kSpan = kWindowSpan<TypeParam> / (this->kIsWide ? 2 : 1);
  for (int apart = kSpan - 2; apart <= kSpan + 2; ++apart) {
    std::vector<TypeParam> flat;
    for (int i = 0; i < kWindowNumel; ++i) {
      const int exponent = std::is_same_v<TypeParam, HalfBits> ? 15 : 0;
      const bool is_small = i % 5 == 0;
      flat.push_back(element_of<TypeParam>(std::ldexp(i % 5 == 1 ? 1.999 : mantissas(random),
                                                      is_small ? exponent - apart : exponent)));
    }
    this->expect_the_squares(flat, {.parts = {{.begin = 0, .numel = kWindowNumel}}});
  }
}

TYPED_TEST(NormKernelTest, CountsInfinitiesAndNansAndSetsTheirPartsFlag) {
  const Case of = parts_over(6000, 2, 70, 5);
  auto flat = numbers<TypeParam>(6000, 4, -4, 4);
  for (const double bad :
       {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
        std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::quiet_NaN()}) {
    for (const size_t place : {size_t{0}, size_t{777}, flat.size() - 1}) {
      flat[place] = element_of<TypeParam>(bad);
      this->expect_the_squares(flat, of);
    }
  }
}

TYPED_TEST(NormKernelTest, AddsLargestAndLeastNumbersWithoutACarry) {
  const double largest = this->kIsWide ? 1e154 : std::is_same_v<TypeParam, HalfBits> ? 65504 : 3e38;
  std::vector<TypeParam> flat(4000, element_of<TypeParam>(largest));
  std::fill(flat.begin(), flat.begin() + 2000,
            element_of<TypeParam>(this->kIsWide ? 2e-162 : 6e-8));
  this->expect_the_squares(flat, parts_over(4000, 1, 1, 6));
}

TEST(NormKernelTest, LeavesWhatEarlierCallsAdded) {
  const auto flat = numbers<float>(5000, 7, -4, 4);
  const Case of{.sums = 1, .flags = 1, .parts = {{.begin = 0, .numel = 5000}}};
  Case twice = of;
  const std::vector<NormRange> ranges = ranges_of(twice);
  std::vector<uint64_t> words(kExactWords + 1);
  for (int call = 0; call < 2; ++call) {
    optim::cuda::add_norm_parts(flat.data(), twice.parts.data(), ranges.data(), ranges[0].blocks,
                                {.first = words.data(), .sums = 1}, nullptr);
  }
  std::vector<uint64_t> once(kExactWords + 1);
  optim::cuda::add_norm_parts(flat.data(), twice.parts.data(), ranges.data(), ranges[0].blocks,
                              {.first = once.data(), .sums = 1}, nullptr);
  for (size_t i = 0; i < words.size(); ++i) EXPECT_EQ(words[i], 2 * once[i]) << i;
}

// A value in any digit: places the squares over all of fp64's range.
TEST(NormKernelTest, ReachesEveryDigit) {
  std::vector<double> flat;
  Case of{.sums = 1, .flags = 1, .parts = {}};
  for (int exponent = -537; exponent < 512; ++exponent) {
    of.parts.push_back({.begin = static_cast<int64_t>(flat.size()), .numel = 1});
    flat.push_back(std::ldexp(1.9999999, exponent));
  }
  EXPECT_TRUE(by_kernel(flat, of) == by_bits(flat, of));
}

// Elements past a part's end belong to another one.
TEST(NormKernelTest, ReadsNothingPastAPartsEnd) {
  std::vector<float> flat(1000, std::numeric_limits<float>::infinity());
  std::fill(flat.begin() + 100, flat.begin() + 400, 1.0F);
  const Case of{.sums = 1, .flags = 1, .parts = {{.begin = 100, .numel = 300}}};
  const Outcome outcome = by_kernel(flat, of);
  EXPECT_FALSE(outcome.flags[0]);
  EXPECT_TRUE(outcome == by_bits(flat, of));
}

}  // namespace
}  // namespace zeropage::optim::norm_kernel_test
