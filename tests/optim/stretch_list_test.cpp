#include "optim/stretch_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::stretch_list_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int64_t kStepNumber = 3;
const GradientFactors kFactors{.scale = 0.7};

void step_list(const AnyOptions& options, const StretchList& list,
               const GradientFactors& factors = kFactors) {
  std::visit([&](const auto& known) { fused_step(known, kStepNumber, list, factors); }, options);
}

void step_pieces(const AnyOptions& options, const Stretch& whole, const StretchPieces& pieces,
                 const GradientFactors& factors = kFactors) {
  std::visit(
      [&](const auto& known) { fused_step_of_pieces(known, kStepNumber, whole, pieces, factors); },
      options);
}

class StretchListTest : public EveryStepCaseTest {
 protected:
  // Stretches with several numels, more than a thread's worth, and with all combinations of dtypes.
  std::vector<Stretch> many_stretches() const {
    std::vector<Stretch> stretches;
    for (const int64_t numel : {0, 1, 4, 100, 1000, 5003, 70000}) {
      for (const auto gradient : {at::kFloat, at::kBFloat16}) {
        for (const auto copy : {at::ScalarType::Undefined, at::kBFloat16, at::kHalf}) {
          stretches.push_back(random_stretch(options(), numel, gradient, copy));
        }
      }
    }
    return stretches;
  }

  static std::vector<Stretch> copies_of(const std::vector<Stretch>& stretches) {
    std::vector<Stretch> copies;
    for (const Stretch& stretch : stretches) copies.push_back(copy_of(stretch));
    return copies;
  }
};

TEST_F(StretchListTest, HasTheBitsOfSingleCallsAtEveryStep) {
  for_each_case([&] {
    const std::vector<Stretch> expected = many_stretches();
    const std::vector<Stretch> actual = copies_of(expected);
    const StretchList list(actual);
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const Stretch& stretch : expected) step(options(), kStepNumber, stretch, kFactors);
      step_list(options(), list);
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits_of(expected[i], actual[i])) << i;
    }
  });
}

TEST_F(StretchListTest, HasThemForAnyNumberOfThreads) {
  for_each_case([&] {
    const std::vector<Stretch> before = many_stretches();
    const int threads_before = at::get_num_threads();
    std::vector<std::vector<Stretch>> results;
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      results.push_back(copies_of(before));
      step_list(options(), StretchList(results.back()));
    }
    at::set_num_threads(threads_before);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bits_of(results[0][i], results[1][i])) << i;
    }
  });
}

TEST_F(StretchListTest, ZeroesGradientsAlsoWhereAnInfinityKeepsAllElse) {
  for_each_case([&] {
    const std::vector<Stretch> before = many_stretches();
    const std::vector<Stretch> after = copies_of(before);
    step_list(options(), StretchList(after),
              {.found_inf = torch::ones({1}), .after = GradientAfter::kZeroed});
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bits_of(before[i], after[i])) << i;
      EXPECT_FALSE(after[i].gradient.any().item<bool>()) << i;
    }
  });
}

TEST_F(StretchListTest, StepsThoseWithSmallerStatesOrSplitValuesToo) {
  const AdamWOptions options(0.1);
  const auto packed_stretch = [&](StateFormat format) {
    Stretch stretch = random_stretch(options, 600);
    stretch.states = make_states(options, stretch.values, format);
    if (format == StateFormat::k8Bit) stretch.scales = make_scales(options, stretch.values, 0);
    return stretch;
  };
  const auto all = [&] {
    return std::vector<Stretch>{random_stretch(options, 50), packed_stretch(StateFormat::k8Bit),
                                packed_stretch(StateFormat::kBf16), random_stretch(options, 60)};
  };
  const std::vector<Stretch> expected = all();
  const std::vector<Stretch> actual = all();
  const StretchList list(actual);
  for (int64_t number = 1; number <= 2; ++number) {
    for (const Stretch& stretch : expected) fused_step(options, number, stretch);
    fused_step(options, number, list);
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(expected[i].values, actual[i].values)) << i;
    for (size_t state = 0; state < expected[i].states.size(); ++state) {
      EXPECT_TRUE(torch::equal(expected[i].states[state], actual[i].states[state])) << i;
    }
  }
}

TEST(StretchListMemoryTest, StepsATensorWhereItWasWhenTheListWasMade) {
  Stretch stretch{.values = torch::ones({4}), .gradient = torch::ones({4})};
  const auto before = stretch.values.detach();
  const StretchList list({stretch});
  stretch.values.set_(torch::zeros({4}));
  fused_step(SGDOptions(1.0), 1, list);
  EXPECT_FALSE(before.any().item<bool>());
  EXPECT_FALSE(stretch.values.any().item<bool>());
}

TEST(StretchListMemoryTest, IsSeenByAutogradToHaveChangedItsValues) {
  const Stretch stretch{.values = torch::ones({3}).requires_grad_(), .gradient = torch::ones({3})};
  const StretchList list({stretch});
  const auto squares = stretch.values.square().sum();
  fused_step(SGDOptions(1.0), 1, list);
  EXPECT_THAT(error_of([&] { squares.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(StretchListRefusesTest, WhatSingleCallsDo) {
  const auto stretches = [] {
    return std::vector<Stretch>{random_stretch(AdamWOptions(), 4),
                                random_stretch(AdamWOptions(), 5)};
  };
  auto spoiled = stretches();
  spoiled[1].gradient = torch::zeros({4});
  EXPECT_EQ(error_of([&] { const StretchList list(spoiled); }),
            "fused_step: gradient: expected 5 elements, as many as values, got 4; pass the same "
            "stretch of every buffer");
  spoiled = stretches();
  spoiled[1] = map(spoiled[1], [](const torch::Tensor& tensor) { return tensor.to(at::kMeta); });
  EXPECT_EQ(error_of([&] { const StretchList list(spoiled); }),
            "fused_step: stretches: expected all on cpu, where the first is, got one on meta; "
            "make a call for each device");
  const StretchList list(stretches());
  EXPECT_EQ(error_of([&] { fused_step(SGDOptions(1.0), 1, list); }),
            "fused_step: states: expected 0 with these options, got 2; make them with "
            "make_states(options, values)");
  EXPECT_THAT(
      error_of([&] { fused_step(AdamWOptions(), 1, list, {.found_inf = torch::zeros({2})}); }),
      HasSubstr("found_inf: expected one fp32 number on cpu"));
}

class StretchPiecesTest : public EveryStepCaseTest {
 protected:
  // Pieces of a stretch of 9000 elements, whose states lie one behind the other.
  static std::vector<StretchPiece> some_pieces() {
    return {{.begin = 16, .first_state = 0, .numel = 4},
            {.begin = 7000, .first_state = 8, .numel = 2000},
            {.begin = 33, .first_state = 2017, .numel = 0},
            {.begin = 33, .first_state = 2017, .numel = 1000},
            {.begin = 1040, .first_state = 3024, .numel = 5003}};
  }
  static constexpr int64_t kNumel = 9000;
  static constexpr int64_t kStateNumel = 8027;

  // Values, gradient and copy_out of kNumel, states of kStateNumel.
  Stretch whole_stretch() const {
    Stretch whole = random_stretch(options(), kNumel, at::kBFloat16, at::kHalf);
    for (torch::Tensor& state : whole.states) state = state.narrow(0, 0, kStateNumel).clone();
    return whole;
  }

  static Stretch part_of(const Stretch& whole, const StretchPiece& piece) {
    const auto of = [&](const torch::Tensor& flat) {
      return flat.narrow(0, piece.begin, piece.numel);
    };
    Stretch part{
        .values = of(whole.values), .gradient = of(whole.gradient), .copy_out = of(whole.copy_out)};
    for (const torch::Tensor& state : whole.states) {
      part.states.push_back(state.narrow(0, piece.first_state, piece.numel));
    }
    return part;
  }
};

TEST_F(StretchPiecesTest, HaveTheBitsOfSingleCallsAndLeaveWhatLiesBetween) {
  for_each_case([&] {
    const Stretch expected = whole_stretch();
    const Stretch actual = copy_of(expected);
    for (const StretchPiece& piece : some_pieces()) {
      if (piece.numel > 0) step(options(), kStepNumber, part_of(expected, piece), kFactors);
    }
    step_pieces(options(), actual, {some_pieces(), at::kCPU});
    EXPECT_TRUE(same_bits_of(expected, actual));
  });
}

TEST_F(StretchPiecesTest, AreFoundWhereTheStretchLiesAtThatStep) {
  for_each_case([&] {
    const StretchPieces pieces(some_pieces(), at::kCPU);
    const Stretch first = whole_stretch();
    const Stretch second = copy_of(first);
    step_pieces(options(), first, pieces);
    step_pieces(options(), second, pieces);
    EXPECT_TRUE(same_bits_of(first, second));
  });
}

TEST_F(StretchPiecesTest, AreRefusedInWordsWhereTheyDoNotFit) {
  const StretchPieces pieces({{.begin = 3, .first_state = 2, .numel = 4}}, at::kCPU);
  EXPECT_EQ(
      error_of([&] {
        fused_step_of_pieces(AdamWOptions(), 1, random_stretch(AdamWOptions(), 6), pieces);
      }),
      "fused_step: pieces: expected them within the 6 elements of values, got one that ends at 7");
  Stretch short_of_states = random_stretch(AdamWOptions(), 8);
  short_of_states.states[1] = torch::zeros({5});
  EXPECT_EQ(error_of([&] { fused_step_of_pieces(AdamWOptions(), 1, short_of_states, pieces); }),
            "fused_step: a state: expected 6 elements or more on cpu, as the pieces have, got 5 on "
            "cpu");
  Stretch packed = random_stretch(AdamWOptions(), 8);
  packed.states = make_states(AdamWOptions(), packed.values, StateFormat::kBf16);
  EXPECT_THAT(error_of([&] { fused_step_of_pieces(AdamWOptions(), 1, packed, pieces); }),
              HasSubstr("pieces: expected whole values and fp32 states"));
  EXPECT_THAT(error_of([] {
                const StretchPieces before({{.begin = -1, .first_state = 0, .numel = 4}}, at::kCPU);
              }),
              HasSubstr("expected them to begin at 0 or later"));
}

TEST_F(StretchPiecesTest, AreCheckedAndNotMadeOnTheMetaDevice) {
  for_each_case([&] {
    const Stretch whole =
        map(whole_stretch(), [](const torch::Tensor& tensor) { return tensor.to(at::kMeta); });
    step_pieces(options(), whole, {some_pieces(), at::kMeta}, {});
  });
}

}  // namespace
}  // namespace zeropage::optim::stretch_list_test
