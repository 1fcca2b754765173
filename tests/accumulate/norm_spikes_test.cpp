#include <functional>
#include <limits>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "zeropage/accumulator.h"

namespace zeropage::accumulate::norm_spikes_test {
namespace {

using ::testing::HasSubstr;
using zeropage::testing::error_of;
using Verdict = NormSpikes::Verdict;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Judges from the fourth norm on; 1, 2, 3, 2 has the mean 2 and the deviation sqrt(2 / 3).
NormSpikeOptions small() {
  return {.window = 4, .z_score = 3, .warm_up = 4, .most_in_a_row = 2};
}

NormSpikes warmed_up(const NormSpikeOptions& options = small()) {
  NormSpikes spikes(options);
  for (const double norm : {1., 2., 3., 2.}) EXPECT_EQ(spikes.look(norm).kind, Verdict::kAccepted);
  return spikes;
}

TEST(NormSpikesTest, MeasuresInStandardDeviationsOfTheWindow) {
  NormSpikes spikes = warmed_up();
  const double deviation = std::sqrt(2. / 3);
  const Verdict below = spikes.look(2 + 2.9 * deviation);
  EXPECT_EQ(below.kind, Verdict::kAccepted);
  EXPECT_DOUBLE_EQ(below.mean, 2);
  EXPECT_DOUBLE_EQ(below.deviation, deviation);
  EXPECT_NEAR(below.z_score, 2.9, 1e-12);

  NormSpikes others = warmed_up();
  const Verdict above = others.look(2 + 3.1 * deviation);
  EXPECT_EQ(above.kind, Verdict::kSpike);
  EXPECT_TRUE(above.skips());
  EXPECT_EQ(others.spikes(), 1);
}

TEST(NormSpikesTest, JudgesNothingBeforeItHasWarmedUp) {
  NormSpikes spikes(small());
  for (const double norm : {1., 1000., 1., 1e6}) EXPECT_FALSE(spikes.look(norm).skips());
}

TEST(NormSpikesTest, AcceptsEveryFall) {
  NormSpikes spikes = warmed_up();
  for (const double norm : {0.1, 1e-6, 0.}) EXPECT_FALSE(spikes.look(norm).skips());
}

TEST(NormSpikesTest, KeepsSpikesOutOfTheWindow) {
  NormSpikes spikes = warmed_up();
  EXPECT_TRUE(spikes.look(100).skips());
  const Verdict next = spikes.look(2);
  EXPECT_DOUBLE_EQ(next.mean, 2);
  EXPECT_EQ(spikes.spikes_in_a_row(), 0);
}

TEST(NormSpikesTest, ForgetsTheOldestNorm) {
  NormSpikes spikes = warmed_up();
  spikes.look(3);
  EXPECT_DOUBLE_EQ(spikes.look(2).mean, (2 + 3 + 2 + 3) / 4.);
}

TEST(NormSpikesTest, SkipsNormsThatAreNotFiniteAtAnyTime) {
  NormSpikes fresh(small());
  EXPECT_EQ(fresh.look(kInfinity).kind, Verdict::kNotFinite);
  NormSpikes spikes = warmed_up();
  for (const double norm : {kInfinity, kNan}) {
    const Verdict verdict = spikes.look(norm);
    EXPECT_EQ(verdict.kind, Verdict::kNotFinite);
    EXPECT_TRUE(verdict.skips());
  }
  EXPECT_DOUBLE_EQ(spikes.look(2).mean, 2);
  EXPECT_EQ(spikes.spikes(), 0);
}

TEST(NormSpikesTest, InAConstantWindowTakesAShareOfTheMeanForTheDeviation) {
  NormSpikeOptions options = small();
  options.least_deviation = 0.125;
  NormSpikes spikes(options);
  for (int i = 0; i < 4; ++i) spikes.look(8);
  // 8 + 3 * 0.125 * 8 = 11.
  EXPECT_EQ(spikes.look(11.5).kind, Verdict::kSpike);
  EXPECT_EQ(spikes.look(11).kind, Verdict::kAccepted);
}

TEST(NormSpikesTest, ComparesWithNothingInAWindowOfZeros) {
  NormSpikes spikes(small());
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(spikes.look(0).skips());
  EXPECT_FALSE(spikes.look(5).skips());
}

TEST(NormSpikesTest, TakesManySpikesInARowForANewLevel) {
  NormSpikes spikes = warmed_up();
  EXPECT_EQ(spikes.look(100).kind, Verdict::kSpike);
  EXPECT_EQ(spikes.look(kInfinity).kind, Verdict::kNotFinite);
  EXPECT_EQ(spikes.look(101).kind, Verdict::kSpike);
  EXPECT_EQ(spikes.spikes_in_a_row(), 2);
  const Verdict verdict = spikes.look(102);
  EXPECT_EQ(verdict.kind, Verdict::kNewLevel);
  EXPECT_FALSE(verdict.skips());
  EXPECT_EQ(spikes.spikes_in_a_row(), 0);
  // The window is its own again after the warm-up.
  for (const double norm : {100., 101., 101.}) {
    const Verdict unjudged = spikes.look(norm);
    EXPECT_EQ(unjudged.kind, Verdict::kAccepted);
    EXPECT_EQ(unjudged.mean, 0);
  }
  EXPECT_DOUBLE_EQ(spikes.look(101).mean, 101);
  EXPECT_EQ(spikes.look(200).kind, Verdict::kSpike);
}

TEST(NormSpikesTest, AnAcceptedNormEndsARow) {
  NormSpikes spikes = warmed_up();
  for (int repeat = 0; repeat < 4; ++repeat) {
    EXPECT_EQ(spikes.look(100).kind, Verdict::kSpike);
    EXPECT_EQ(spikes.look(100).kind, Verdict::kSpike);
    EXPECT_EQ(spikes.look(2).kind, Verdict::kAccepted);
  }
  EXPECT_EQ(spikes.spikes(), 8);
}

TEST(NormSpikesTest, StopsIfAskedAndLeavesTheWindowAsItWas) {
  NormSpikeOptions options = small();
  options.on_spike = OnSpike::kStop;
  NormSpikes spikes = warmed_up(options);
  for (int repeat = 0; repeat < 4; ++repeat) {
    EXPECT_EQ(error_of([&] { spikes.look(100); }),
              "NormSpikes: the gradient norm 100 is 120.025 standard deviations above the mean of "
              "the last 4 norms (mean 2, deviation 0.816497), expected at most 3; look at this "
              "step's batch, lower the learning rate, or go on with OnSpike::kSkip");
  }
  EXPECT_EQ(spikes.spikes(), 0);
  EXPECT_DOUBLE_EQ(spikes.look(2).mean, 2);
}

TEST(NormSpikesTest, GoesOnWithTheSameBitsAfterSaveAndLoad) {
  const auto norm_at = [](int step) { return step % 11 == 10 ? 500. : 1 + std::sin(step) / 3; };
  const NormSpikeOptions options = {.window = 16, .z_score = 4, .warm_up = 8};
  for (int stop = 0; stop < 50; stop += 7) {
    NormSpikes straight(options);
    for (int step = 0; step < stop; ++step) straight.look(norm_at(step));
    std::stringstream saved;
    torch::save(straight, saved);
    NormSpikes resumed(options);
    torch::load(resumed, saved);
    for (int step = stop; step < 60; ++step) {
      const Verdict expected = straight.look(norm_at(step));
      const Verdict verdict = resumed.look(norm_at(step));
      EXPECT_EQ(verdict.kind, expected.kind);
      EXPECT_EQ(verdict.mean, expected.mean);
      EXPECT_EQ(verdict.deviation, expected.deviation);
      EXPECT_EQ(verdict.z_score, expected.z_score);
    }
    EXPECT_EQ(resumed.spikes(), straight.spikes());
  }
}

TEST(NormSpikesTest, RefusesADamagedStateAndStaysAsItWas) {
  NormSpikes spikes = warmed_up();
  const auto refusal = [&](const std::vector<double>& norms, int64_t count, int64_t in_a_row) {
    return error_of([&] {
      std::stringstream stream;
      torch::serialize::OutputArchive out;
      out.write("norms", c10::IValue(norms));
      out.write("spikes", c10::IValue(count));
      out.write("spikes_in_a_row", c10::IValue(in_a_row));
      out.save_to(stream);
      torch::load(spikes, stream);
    });
  };
  EXPECT_EQ(refusal({1, 2, 3, 4, 5}, 0, 0),
            "NormSpikes: the archive has 5 norms, more than this window's 4; load it into one made "
            "with a window of at least 5");
  for (const double norm : {-1., kInfinity, kNan}) {
    EXPECT_THAT(refusal({1, norm}, 0, 0), HasSubstr("expected finite norms of 0 or more"));
  }
  EXPECT_THAT(refusal({1}, -1, 0), HasSubstr("\"spikes\" in the archive: expected an integer"));
  EXPECT_THAT(refusal({1}, 1, 2), HasSubstr("more spikes in a row (2) than spikes (1)"));
  EXPECT_DOUBLE_EQ(spikes.look(2).mean, 2);
  EXPECT_EQ(refusal({}, 0, 0), "");
  EXPECT_EQ(spikes.look(2).mean, 0);
}

TEST(NormSpikesTest, RefusesInWords) {
  const auto refusal = [](const NormSpikeOptions& options) {
    return error_of([&] { NormSpikes spikes(options); });
  };
  EXPECT_EQ(refusal({.window = 1, .warm_up = 1}),
            "NormSpikes: window: expected 2 norms or more, got 1");
  EXPECT_EQ(refusal({.z_score = 0}),
            "NormSpikes: z_score: expected a finite number above 0, got 0");
  EXPECT_EQ(refusal({.window = 16}),
            "NormSpikes: warm_up: expected from 2 norms to the window's 16, got 32");
  EXPECT_THAT(refusal({.warm_up = 1}), HasSubstr("warm_up: expected from 2 norms"));
  EXPECT_THAT(refusal({.least_deviation = 0}), HasSubstr("least_deviation: expected a finite"));
  EXPECT_THAT(refusal({.most_in_a_row = 0}), HasSubstr("most_in_a_row: expected 1 or more, got 0"));
  NormSpikes spikes;
  EXPECT_EQ(error_of([&] { spikes.look(-1); }),
            "NormSpikes: expected a gradient norm of 0 or more, got -1");
}

}  // namespace
}  // namespace zeropage::accumulate::norm_spikes_test
