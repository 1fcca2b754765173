#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "zeropage/batches.h"

namespace zeropage::accumulate::batch_arithmetic_test {

void PrintTo(const SolvedBatch& sizes, std::ostream* out) {
  *out << sizes.global_batch << " = " << sizes.micro_batch << " * " << sizes.accumulation << " * "
       << sizes.ranks;
}

namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using zeropage::testing::error_of;

// In the order of the fields.
SolvedBatch sizes(int64_t global_batch, int64_t micro_batch, int64_t accumulation, int64_t ranks) {
  return {global_batch, micro_batch, accumulation, ranks};
}

std::string refusal(const BatchSizes& given) {
  return error_of([&] { solve_batch(given); });
}

TEST(BatchArithmeticTest, SolvesForTheOneThatIsMissing) {
  const SolvedBatch expected = sizes(1024, 8, 32, 4);
  EXPECT_EQ(solve_batch({.micro_batch = 8, .accumulation = 32, .ranks = 4}), expected);
  EXPECT_EQ(solve_batch({.global_batch = 1024, .accumulation = 32, .ranks = 4}), expected);
  EXPECT_EQ(solve_batch({.global_batch = 1024, .micro_batch = 8, .ranks = 4}), expected);
  EXPECT_EQ(solve_batch({.global_batch = 1024, .micro_batch = 8, .accumulation = 32}), expected);
  EXPECT_EQ(solve_batch({.global_batch = 1024, .micro_batch = 8, .accumulation = 32, .ranks = 4}),
            expected);
}

TEST(BatchArithmeticTest, TakesOneForWhatIsNotDetermined) {
  EXPECT_EQ(solve_batch({.global_batch = 12, .micro_batch = 4}), sizes(12, 4, 3, 1));
  EXPECT_EQ(solve_batch({.global_batch = 12, .accumulation = 4}), sizes(12, 3, 4, 1));
  EXPECT_EQ(solve_batch({.global_batch = 12, .ranks = 4}), sizes(12, 3, 1, 4));
  EXPECT_EQ(solve_batch({.micro_batch = 3, .accumulation = 4}), sizes(12, 3, 4, 1));
  EXPECT_EQ(solve_batch({.micro_batch = 3, .ranks = 4}), sizes(12, 3, 1, 4));
  EXPECT_EQ(solve_batch({.accumulation = 3, .ranks = 4}), sizes(12, 1, 3, 4));
}

TEST(BatchArithmeticTest, MultipliesOutWhateverItSolves) {
  for (int64_t first = 1; first <= 6; ++first) {
    for (int64_t second = 1; second <= 6; ++second) {
      const int64_t global = 2 * first * second;
      for (const BatchSizes& given :
           {BatchSizes{.global_batch = global, .micro_batch = first, .accumulation = second},
            BatchSizes{.global_batch = global, .micro_batch = first, .ranks = second},
            BatchSizes{.global_batch = global, .accumulation = first, .ranks = second}}) {
        const SolvedBatch solved = solve_batch(given);
        EXPECT_EQ(solved.global_batch, global);
        EXPECT_EQ(solved.micro_batch * solved.accumulation * solved.ranks, global);
      }
    }
  }
}

TEST(BatchArithmeticTest, RefusesFewerThanTwo) {
  EXPECT_EQ(refusal({}),
            "solve_batch: expected at least two of global_batch, micro_batch, accumulation and "
            "ranks, got none; give another one");
  EXPECT_THAT(refusal({.ranks = 4}), HasSubstr("got only ranks = 4; give another one"));
}

TEST(BatchArithmeticTest, RefusesSizesBelowOneByName) {
  EXPECT_EQ(refusal({.global_batch = 0, .ranks = 4}),
            "solve_batch: global_batch: expected 1 or more, got 0");
  EXPECT_EQ(refusal({.global_batch = 4, .micro_batch = -1}),
            "solve_batch: micro_batch: expected 1 or more, got -1");
  EXPECT_EQ(refusal({.accumulation = 0, .ranks = 4}),
            "solve_batch: accumulation: expected 1 or more, got 0");
  EXPECT_EQ(refusal({.accumulation = 2, .ranks = -4}),
            "solve_batch: ranks: expected 1 or more, got -4");
}

TEST(BatchArithmeticTest, NamesTheNearestThatFit) {
  EXPECT_EQ(refusal({.global_batch = 10, .micro_batch = 4}),
            "solve_batch: global_batch 10 with micro_batch 4: expected a multiple of 4; nearest "
            "are global_batch 8 or 12, or micro_batch 2 or 5");
  EXPECT_EQ(refusal({.global_batch = 100, .micro_batch = 8, .ranks = 4}),
            "solve_batch: global_batch 100 with micro_batch 8 * ranks 4: expected a multiple of "
            "32; nearest are global_batch 96 or 128, or micro_batch 5 or 25");
  EXPECT_EQ(refusal({.global_batch = 24, .micro_batch = 4, .ranks = 4}),
            "solve_batch: global_batch 24 with micro_batch 4 * ranks 4: expected a multiple of 16; "
            "nearest are global_batch 16 or 32, or micro_batch 3 or 6, or ranks 3 or 6");
}

TEST(BatchArithmeticTest, NamesOnlyWhatIsThere) {
  EXPECT_EQ(refusal({.global_batch = 3, .ranks = 4}),
            "solve_batch: global_batch 3 with ranks 4: expected a multiple of 4; nearest are "
            "global_batch 4, or ranks 3");
  EXPECT_EQ(refusal({.global_batch = 7, .accumulation = 4}),
            "solve_batch: global_batch 7 with accumulation 4: expected a multiple of 4; nearest "
            "are global_batch 4 or 8, or accumulation 1 or 7");
}

TEST(BatchArithmeticTest, RefusesFourThatContradict) {
  EXPECT_EQ(
      refusal({.global_batch = 32, .micro_batch = 2, .accumulation = 2, .ranks = 2}),
      "solve_batch: global_batch 32 with micro_batch 2 * accumulation 2 * ranks 2: expected 8; "
      "nearest are global_batch 8, or micro_batch 8, or accumulation 8, or ranks 8");
  EXPECT_EQ(
      refusal({.global_batch = 12, .micro_batch = 3, .accumulation = 2, .ranks = 5}),
      "solve_batch: global_batch 12 with micro_batch 3 * accumulation 2 * ranks 5: expected 30; "
      "nearest are global_batch 30, or ranks 2");
}

TEST(BatchArithmeticTest, RefusesProductsThatOverflow) {
  const int64_t large = int64_t{1} << 40;
  EXPECT_EQ(refusal({.micro_batch = large, .ranks = large}),
            "solve_batch: micro_batch 1099511627776 * accumulation 1 * ranks 1099511627776 does "
            "not fit into 64 bits; give smaller ones");
  EXPECT_THAT(refusal({.global_batch = 8, .micro_batch = large, .ranks = large}),
              HasSubstr("does not fit into 64 bits"));
}

TEST(BatchArithmeticTest, NamesNoBatchThatOverflows) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::string words = refusal({.global_batch = most, .ranks = 1000});
  EXPECT_THAT(words, HasSubstr("nearest are global_batch 9223372036854775000"));
  EXPECT_THAT(words, Not(HasSubstr(" or ")));
}

}  // namespace
}  // namespace zeropage::accumulate::batch_arithmetic_test
