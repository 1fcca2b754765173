#include <functional>
#include <limits>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "zeropage/accumulator.h"

namespace zeropage::accumulate::loss_scaler_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using zeropage::testing::error_of;

// The scale after each step; 'x' overflows, '.' does not.
std::vector<double> scales_of(LossScaler& scaler, const std::string& steps) {
  std::vector<double> scales;
  for (const char step : steps) scales.push_back(scaler.update(step == 'x').scale_after);
  return scales;
}

std::vector<double> scales_of(const LossScalerOptions& options, const std::string& steps) {
  LossScaler scaler(options);
  return scales_of(scaler, steps);
}

// Saves what `write` writes and loads it into the scaler.
void load_written(LossScaler& scaler,
                  const std::function<void(torch::serialize::OutputArchive&)>& write) {
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  write(out);
  out.save_to(stream);
  torch::load(scaler, stream);
}

TEST(LossScalerTest, GrowsAfterGoodStepsInARow) {
  const LossScalerOptions options = {.initial_scale = 4, .growth_interval = 3};
  EXPECT_THAT(scales_of(options, "......"), ElementsAre(4, 4, 8, 8, 8, 16));
  EXPECT_THAT(scales_of(options, "..x..."), ElementsAre(4, 4, 2, 2, 2, 4));
}

TEST(LossScalerTest, BacksOffAtAnOverflowAndSkipsTheStep) {
  LossScaler scaler;
  EXPECT_EQ(scaler.scale(), 65536);
  const auto verdict = scaler.update(true);
  EXPECT_TRUE(verdict.skipped);
  EXPECT_FALSE(verdict.at_minimum);
  EXPECT_EQ(verdict.scale_before, 65536);
  EXPECT_EQ(verdict.scale_after, 32768);
  EXPECT_EQ(scaler.scale(), 32768);
  EXPECT_FALSE(scaler.update(false).skipped);
}

TEST(LossScalerTest, CountsSteps) {
  LossScaler scaler;
  scales_of(scaler, "..xx.xxx");
  EXPECT_EQ(scaler.skipped_steps(), 5);
  EXPECT_EQ(scaler.skipped_in_a_row(), 3);
  EXPECT_EQ(scaler.good_steps(), 0);
  scales_of(scaler, "..");
  EXPECT_EQ(scaler.skipped_in_a_row(), 0);
  EXPECT_EQ(scaler.good_steps(), 2);
}

TEST(LossScalerTest, WithHysteresisForgivesOverflowsUntilItGrows) {
  const LossScalerOptions options = {.initial_scale = 64, .growth_interval = 3, .hysteresis = 3};
  EXPECT_THAT(scales_of(options, "xxxx"), ElementsAre(64, 64, 32, 16));
  // Good steps between overflows forgive nothing; a growth does.
  EXPECT_THAT(scales_of(options, "x.x.x"), ElementsAre(64, 64, 64, 64, 32));
  EXPECT_THAT(scales_of(options, "xx...xx"), ElementsAre(64, 64, 64, 64, 128, 128, 128));
}

TEST(LossScalerTest, StaysWithinItsBounds) {
  const LossScalerOptions options = {
      .initial_scale = 4, .growth_interval = 1, .min_scale = 2, .max_scale = 8};
  EXPECT_THAT(scales_of(options, "...xxxx"), ElementsAre(8, 8, 8, 4, 2, 2, 2));
}

TEST(LossScalerTest, TakesLargerFactorsAndStopsAtTheBounds) {
  const LossScalerOptions options = {.initial_scale = 16,
                                     .growth_factor = 8,
                                     .backoff_factor = 0.125,
                                     .growth_interval = 1,
                                     .max_scale = 256};
  EXPECT_THAT(scales_of(options, "..xxx"), ElementsAre(128, 256, 32, 4, 1));
}

TEST(LossScalerTest, SaysWhenItCannotGoLower) {
  LossScaler scaler({.initial_scale = 2});
  EXPECT_FALSE(scaler.update(true).at_minimum);
  EXPECT_TRUE(scaler.update(true).at_minimum);
  EXPECT_FALSE(scaler.update(false).at_minimum);
}

TEST(LossScalerTest, WithHysteresisIsNotAtItsMinimumWhileItForgives) {
  LossScaler scaler({.initial_scale = 1, .hysteresis = 2, .at_minimum = AtMinimum::kStop});
  EXPECT_FALSE(scaler.update(true).at_minimum);
  EXPECT_THAT(error_of([&] { scaler.update(true); }), HasSubstr("skipped in a row: 2;"));
}

TEST(LossScalerTest, StopsAtTheMinimumIfAsked) {
  LossScaler scaler({.initial_scale = 2, .at_minimum = AtMinimum::kStop});
  scaler.update(true);
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_EQ(error_of([&] { scaler.update(true); }),
              "LossScaler: gradients overflow at the scale 1, and it cannot go lower: steps "
              "skipped in a row: 2; look for infinities in the loss, lower the learning rate, "
              "compute in bf16 or fp32, lower min_scale, or go on with AtMinimum::kContinue");
  }
  EXPECT_EQ(scaler.skipped_steps(), 1);
}

TEST(LossScalerTest, FixedNeverChanges) {
  LossScaler scaler(LossScalerOptions::fixed(128));
  for (int step = 0; step < 5000; ++step) scaler.update(step % 7 == 0);
  EXPECT_EQ(scaler.scale(), 128);
  EXPECT_EQ(scaler.skipped_steps(), 715);
  EXPECT_TRUE(scaler.update(true).at_minimum);
}

TEST(LossScalerTest, ScalesExactlyAtEveryScaleItReaches) {
  LossScaler scaler({.initial_scale = 1, .growth_interval = 1});
  const at::Tensor values = torch::randn({100});
  for (int step = 0; step < 30; ++step) {
    const at::Tensor scaled = values * scaler.scale();
    EXPECT_TRUE(at::equal(scaled * (1 / scaler.scale()), values));
    scaler.update(false);
  }
  EXPECT_EQ(scaler.scale(), 16777216);
}

TEST(LossScalerTest, GoesOnAsBeforeAfterSaveAndLoad) {
  const LossScalerOptions options = {.initial_scale = 1024, .growth_interval = 4, .hysteresis = 2};
  const std::string steps = "..x....xx.x......x.xx..x........";
  for (size_t stop = 0; stop <= steps.size(); ++stop) {
    LossScaler straight(options);
    scales_of(straight, steps.substr(0, stop));
    std::stringstream saved;
    torch::save(straight, saved);
    LossScaler resumed(options);
    torch::load(resumed, saved);
    EXPECT_EQ(resumed.skipped_in_a_row(), straight.skipped_in_a_row());
    EXPECT_EQ(scales_of(resumed, steps.substr(stop)), scales_of(straight, steps.substr(stop)));
    EXPECT_EQ(resumed.skipped_steps(), straight.skipped_steps());
    EXPECT_EQ(resumed.good_steps(), straight.good_steps());
  }
}

TEST(LossScalerTest, RefusesADamagedStateAndStaysAsItWas) {
  LossScaler scaler({.initial_scale = 16, .max_scale = 1024});
  scaler.update(true);
  const auto refusal = [&](double scale, int64_t good, int64_t skipped, int64_t in_a_row) {
    return error_of([&] {
      load_written(scaler, [&](auto& archive) {
        archive.write("scale", c10::IValue(scale));
        archive.write("good_steps", c10::IValue(good));
        archive.write("overflows", c10::IValue(int64_t{0}));
        archive.write("skipped_steps", c10::IValue(skipped));
        archive.write("skipped_in_a_row", c10::IValue(in_a_row));
      });
    });
  };
  EXPECT_EQ(refusal(2048, 0, 0, 0),
            "LossScaler: \"scale\" in the archive: expected a power of two from min_scale 1 to "
            "max_scale 1024, got 2048; load it into a scaler made with the options of the one "
            "that was saved");
  for (const double scale : {0.0, -4.0, 3.0, 0.5, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(refusal(scale, 0, 0, 0), HasSubstr("expected a power of two")) << scale;
  }
  EXPECT_EQ(refusal(4, -1, 0, 0),
            "LossScaler: \"good_steps\" in the archive: expected an integer of 0 or more, got -1");
  EXPECT_THAT(refusal(4, 0, 1, 2), HasSubstr("more steps skipped in a row (2)"));
  EXPECT_THAT(error_of([&] { load_written(scaler, [](auto&) {}); }),
              HasSubstr("the archive has no \"scale\"; expected one that was saved from a "
                        "LossScaler"));
  EXPECT_THAT(error_of([&] {
                load_written(scaler,
                             [](auto& archive) { archive.write("scale", c10::IValue("four")); });
              }),
              HasSubstr("expected a float, got String"));
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_EQ(scaler.skipped_steps(), 1);
  EXPECT_EQ(refusal(4, 7, 2, 2), "");
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_EQ(scaler.good_steps(), 7);
}

TEST(LossScalerTest, RefusesOptionsThatWouldRound) {
  const auto refusal = [](const LossScalerOptions& options) {
    return error_of([&] { LossScaler scaler(options); });
  };
  EXPECT_EQ(refusal({.initial_scale = 1000}),
            "LossScaler: initial_scale: expected a power of two from 2^-126 to 2^126, got 1000; "
            "with any other factor unscaled gradients are rounded");
  EXPECT_THAT(refusal({.growth_factor = 1.5}), HasSubstr("growth_factor: expected a power of two"));
  EXPECT_THAT(refusal({.backoff_factor = 0.7}), HasSubstr("backoff_factor: expected a power"));
  EXPECT_THAT(refusal({.min_scale = 0}), HasSubstr("min_scale: expected a power of two"));
  EXPECT_THAT(refusal({.max_scale = std::ldexp(1, 127)}), HasSubstr("max_scale: expected a power"));
  EXPECT_THAT(refusal(LossScalerOptions::fixed(3)), HasSubstr("expected a power of two"));
}

TEST(LossScalerTest, RefusesOptionsOutOfRange) {
  const auto refusal = [](const LossScalerOptions& options) {
    return error_of([&] { LossScaler scaler(options); });
  };
  EXPECT_EQ(
      refusal({.initial_scale = 4, .min_scale = 8}),
      "LossScaler: initial_scale: expected one from min_scale 8 to max_scale 16777216, got 4");
  EXPECT_THAT(refusal({.growth_factor = 0.5}), HasSubstr("growth_factor: expected 1 or more"));
  EXPECT_THAT(refusal({.backoff_factor = 2}), HasSubstr("backoff_factor: expected 1 or less"));
  EXPECT_THAT(refusal({.growth_interval = 0}), HasSubstr("expected 1 step or more, got 0"));
  EXPECT_THAT(refusal({.hysteresis = 0}), HasSubstr("expected 1 overflow or more, got 0"));
}

}  // namespace
}  // namespace zeropage::accumulate::loss_scaler_test
