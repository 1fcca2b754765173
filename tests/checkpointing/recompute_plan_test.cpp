#include "checkpointing/recompute_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/checkpointing/synthetic_steps.h"
#include "tests/harness/errors.h"

namespace zeropage::checkpointing::recompute_plan_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using zeropage::testing::error_of;

// The search without the enumeration that would hide its mistakes in small steps.
const PlanOptions kSearchOnly = {.exhaustive_items = 0};

std::vector<bool> nothing(const RecordedStep& step) {
  return std::vector<bool>(step.values.size(), false);
}

std::vector<bool> dropping(const RecordedStep& step, const std::vector<size_t>& values) {
  std::vector<bool> dropped = nothing(step);
  for (const size_t value : values) dropped[value] = true;
  return dropped;
}

int64_t kept_peak(const RecordedStep& step) {
  return simulate(step, nothing(step)).peak_bytes;
}

// Seconds of what is replayed of operators whose signature is one of these.
double replayed_seconds(const RecordedStep& step, const Forecast& forecast,
                        const std::vector<std::string>& signatures) {
  double seconds = 0;
  for (size_t op = 0; op < step.operators.size(); ++op) {
    const auto& [signature, each, inputs, replayable] = step.operators[op];
    const bool counts =
        std::find(signatures.begin(), signatures.end(), signature) != signatures.end();
    if (counts) seconds += each * static_cast<double>(forecast.replays[op]);
  }
  return seconds;
}

// Leaf 0 -> a: value 1, 10 bytes -> b: value 2, 20 bytes, passing -> c: value 3, 30 bytes -> d:
// value 4, 40 bytes. Ticks 0 to 2 save 1, 3, 4; then d, c and b go backward.
RecordedStep chain() {
  RecordedStep step;
  step.operators = {{"a", 1, {0}}, {"b", 2, {1}}, {"c", 4, {2}}, {"d", 8, {3}}};
  step.values = {{.bytes = 1000},
                 {10, 0, Retention::kSaved},
                 {20, 1, Retention::kPassing},
                 {30, 2, Retention::kSaved},
                 {40, 3, Retention::kSaved}};
  step.ticks = {
      {Event::kSave, 1, 5},     // 10 + 5
      {Event::kSave, 3, 25},    // 40 + 25
      {Event::kSave, 4, 3},     // 80 + 3
      {Event::kNeed, 4, 7},     // 80 + 7
      {Event::kRelease, 4, 9},  // 80 + 9
      {Event::kNeed, 3, 6},     // 40 + 6
      {Event::kRelease, 3, 8},  // 40 + 8
      {Event::kNeed, 1, 2},     // 10 + 2
      {Event::kRelease, 1, 4},  // 10 + 4
  };
  return step;
}

TEST(SimulateTest, CountsWhatIsKeptFromItsSaveToItsRelease) {
  const RecordedStep step = chain();
  const Forecast forecast = simulate(step, nothing(step));
  EXPECT_EQ(forecast.peak_bytes, 89);
  EXPECT_EQ(forecast.peak_tick, 4U);
  EXPECT_EQ(forecast.replay_seconds, 0);
  EXPECT_THAT(forecast.replays, ElementsAre(0, 0, 0, 0));
}

TEST(SimulateTest, DropsAValueTwoTicksAfterItsSave) {
  RecordedStep step = chain();
  // Value 1 (10 bytes) is there at ticks 0, 1, 2 and comes back at tick 7.
  const auto peak_with_other_bytes_at = [&](size_t tick) {
    RecordedStep changed = step;
    changed.ticks[tick].other_bytes = 1000;
    return simulate(changed, dropping(changed, {1})).peak_bytes - 1000;
  };
  EXPECT_EQ(peak_with_other_bytes_at(0), 10);
  EXPECT_EQ(peak_with_other_bytes_at(1), 40);
  EXPECT_EQ(peak_with_other_bytes_at(2), 80);
  EXPECT_EQ(peak_with_other_bytes_at(3), 70);
  EXPECT_EQ(peak_with_other_bytes_at(5), 30);
  EXPECT_EQ(peak_with_other_bytes_at(7), 0);
  EXPECT_EQ(peak_with_other_bytes_at(8), 10);
}

TEST(SimulateTest, ReplaysThroughPassingValuesAndFreesThemWithinTheReplay) {
  RecordedStep step = chain();
  // Value 3 (30 bytes) is there at ticks 1, 2, 3; at tick 5 b brings 20 and c 30 beside value 1, and
  // min(6, 8) are alive meanwhile: 10 + 50 + 6. The tick after has 10 + 30 + 8.
  step.ticks[4].other_bytes = 0;
  step.ticks[3].other_bytes = 0;
  step.ticks[2].other_bytes = 0;
  step.ticks[5].other_bytes = 45;
  step.ticks[6].other_bytes = 40;
  const Forecast forecast = simulate(step, dropping(step, {3}));
  EXPECT_EQ(forecast.peak_bytes, 10 + 20 + 30 + 40);
  EXPECT_EQ(forecast.peak_tick, 5U);
  EXPECT_EQ(forecast.replay_seconds, 2 + 4);
  EXPECT_THAT(forecast.replays, ElementsAre(0, 1, 1, 0));
  // After it only value 3 stays.
  step.ticks[6].other_bytes = 1000;
  EXPECT_EQ(simulate(step, dropping(step, {3})).peak_bytes, 10 + 30 + 1000);
}

TEST(SimulateTest, ReplaysAChainOnceAndKeepsWhatItBringsUntilTheRelease) {
  RecordedStep step = chain();
  const std::vector<bool> all = dropping(step, {1, 3, 4});
  Forecast forecast = simulate(step, all);
  EXPECT_EQ(forecast.replay_seconds, 1 + 2 + 4 + 8);
  EXPECT_THAT(forecast.replays, ElementsAre(1, 1, 1, 1));
  // At tick 3 values 3 and 4 linger (30 + 40); the replay has a 10, b 30, c 60 and without b's
  // 40, d 80; min(7, 9) meanwhile.
  EXPECT_EQ(forecast.peak_bytes, 70 + 80 + 7);
  EXPECT_EQ(forecast.peak_tick, 3U);
  // All three are there after it, each until its release.
  step.ticks[5].other_bytes = 1000;
  EXPECT_EQ(simulate(step, all).peak_bytes, 10 + 30 + 1000);
  step.ticks[7].other_bytes = 2000;
  EXPECT_EQ(simulate(step, all).peak_bytes, 10 + 2000);
}

TEST(SimulateTest, ReplaysAPassingOperatorForEachReplayThatReadsIt) {
  RecordedStep step;
  step.operators = {{"mask", 1, {0}}, {"one", 2, {1}}, {"two", 4, {1}}};
  step.values = {{.bytes = 0},
                 {100, 0, Retention::kPassing},
                 {10, 1, Retention::kSaved},
                 {10, 2, Retention::kSaved}};
  step.ticks = {{Event::kSave, 2},    {Event::kSave, 3}, {Event::kNeed, 3},
                {Event::kRelease, 3}, {Event::kNeed, 2}, {Event::kRelease, 2}};
  const Forecast forecast = simulate(step, dropping(step, {2, 3}));
  EXPECT_THAT(forecast.replays, ElementsAre(2, 1, 1));
  EXPECT_EQ(forecast.replay_seconds, 2 * 1 + 2 + 4);
}

TEST(SimulateTest, BringsAllOutputsOfAnOperatorByOneReplay) {
  RecordedStep step;
  step.operators = {{"split", 1, {0}}};
  step.values = {{.bytes = 0},
                 {10, 0, Retention::kSaved},
                 {20, 0, Retention::kSaved},
                 {40, 0, Retention::kPassing}};
  step.ticks = {{Event::kSave, 1},    {Event::kSave, 2},      {Event::kNeed, 2},
                {Event::kRelease, 2}, {Event::kNeed, 1, 100}, {Event::kRelease, 1}};
  const Forecast forecast = simulate(step, dropping(step, {1, 2}));
  EXPECT_THAT(forecast.replays, ElementsAre(1));
  // At the second need value 1 is there and value 2 gone.
  EXPECT_EQ(forecast.peak_bytes, 10 + 100);
}

TEST(SimulateTest, FreesWhatAReplayDoesNotUse) {
  RecordedStep step;
  step.operators = {{"split", 1, {0}}, {"use", 1, {2}}};
  step.values = {{.bytes = 0},
                 {100, 0, Retention::kSaved},
                 {20, 0, Retention::kPassing},
                 {150, 1, Retention::kSaved}};
  step.ticks = {{Event::kSave, 3}, {Event::kSave, 1},    {Event::kNeed, 1},   {Event::kNeed, 1},
                {Event::kNeed, 3}, {Event::kRelease, 3}, {Event::kRelease, 1}};
  // Value 1 is kept; its copy of 100 is gone when the second operator runs, the 20 that it reads are
  // there beside its own 150.
  EXPECT_EQ(simulate(step, dropping(step, {3})).peak_bytes, 100 + 20 + 150);
}

TEST(SimulateTest, LetsNothingLingerPastItsRelease) {
  RecordedStep step;
  step.operators = {{"a", 1, {0}}};
  step.values = {{.bytes = 0}, {10, 0, Retention::kSaved}, {0, kLeaf, Retention::kSaved}};
  step.ticks = {{Event::kSave, 1}, {Event::kRelease, 1}, {Event::kSave, 2, 100}};
  EXPECT_EQ(simulate(step, dropping(step, {1})).peak_bytes, 100);
}

TEST(SimulateTest, KeepsWhatALaterReplayReads) {
  RecordedStep step;
  step.operators = {{"a", 1, {0}}, {"b", 1, {1}}};
  step.values = {{.bytes = 0}, {10, 0, Retention::kSaved}, {20, 1, Retention::kSaved}};
  step.ticks = {{Event::kSave, 1},    {Event::kSave, 2},      {Event::kNeed, 1},
                {Event::kRelease, 1}, {Event::kNeed, 2, 100}, {Event::kRelease, 2}};
  EXPECT_EQ(simulate(step, nothing(step)).peak_bytes, 20 + 100);
  // Value 2 lingers at tick 3, is gone at 4; value 1 is not, though autograd released it.
  EXPECT_EQ(simulate(step, dropping(step, {2})).peak_bytes, 10 + 100);
}

TEST(SimulateTest, AveragesSecondsOverEqualSignatures) {
  RecordedStep step = chain();
  step.operators[2].signature = step.operators[3].signature = "same";
  EXPECT_EQ(simulate(step, dropping(step, {4})).replay_seconds, (4 + 8) / 2.0);
}

TEST(SimulateTest, ChargesNothingForWhatBackwardNeverNeeds) {
  RecordedStep step = chain();
  step.ticks[3].event = Event::kRelease;
  EXPECT_EQ(simulate(step, dropping(step, {4})).replay_seconds, 0);
}

TEST(SimulateTest, KnowsWhatCannotBeReplayed) {
  RecordedStep step = chain();
  EXPECT_THAT(droppable_values(step), ElementsAre(false, true, false, true, true));
  // Not by itself, not through a passing value, not in place; what is kept is read all the same.
  step.operators[1].replayable = false;
  EXPECT_THAT(droppable_values(step), ElementsAre(false, true, false, false, true));
  step.operators[3].inputs = {4};
  EXPECT_THAT(droppable_values(step), ElementsAre(false, true, false, false, false));
  step.values[1].retention = Retention::kHeld;
  EXPECT_THAT(droppable_values(step), ElementsAre(false, false, false, false, false));
  EXPECT_THAT(error_of([&] { simulate(step, dropping(step, {3})); }),
              HasSubstr("simulate: value 3: expected it to be kept, got it dropped"));
}

TEST(SimulateTest, RefusesAStepThatContradictsItself) {
  const auto refusal = [](const auto& change) {
    RecordedStep step = chain();
    change(step);
    return error_of([&] { simulate(step, nothing(step)); });
  };
  EXPECT_EQ(refusal([](RecordedStep&) {}), "");
  EXPECT_THAT(refusal([](RecordedStep& step) { step.operators[2].inputs = {9}; }),
              HasSubstr("operator 2 (c): expected inputs below 5, got 9"));
  EXPECT_THAT(refusal([](RecordedStep& step) { step.values[3].producer = 7; }),
              HasSubstr("value 3: expected a producer below 4 or checkpointing::kLeaf, got 7"));
  EXPECT_THAT(refusal([](RecordedStep& step) { step.ticks[1].value = 1; }),
              HasSubstr("tick 1: value 1 is saved a second time"));
  EXPECT_THAT(refusal([](RecordedStep& step) { std::swap(step.ticks[2], step.ticks[3]); }),
              HasSubstr("tick 2: value 4 is used before its save"));
  EXPECT_THAT(refusal([](RecordedStep& step) { step.ticks[4].value = 2; }),
              HasSubstr("tick 4: expected a saved value, got value 2, which passes"));
  EXPECT_THAT(refusal([](RecordedStep& step) { step.ticks.clear(); }),
              HasSubstr("value 1: expected a tick that saves it, got none"));
  EXPECT_THAT(refusal([](RecordedStep& step) { step.ticks[0].other_bytes = -1; }),
              HasSubstr("tick 0: expected 0 or more other bytes, got -1"));
  EXPECT_THAT(refusal([](RecordedStep& step) { step.values[1].bytes = -1; }),
              HasSubstr("value 1: expected 0 or more bytes, got -1"));
  EXPECT_THAT(error_of([] { simulate(chain(), {true}); }),
              HasSubstr("expected one decision for each of 5 values, got 1"));
}

// Every set of droppable values, by the simulator.
class BruteForce {
 public:
  explicit BruteForce(const RecordedStep& step) {
    std::vector<size_t> candidates;
    const std::vector<bool> droppable = droppable_values(step);
    for (size_t value = 0; value < droppable.size(); ++value) {
      if (droppable[value]) candidates.push_back(value);
    }
    for (size_t mask = 0; mask < size_t{1} << candidates.size(); ++mask) {
      std::vector<bool> dropped = nothing(step);
      for (size_t at = 0; at < candidates.size(); ++at) dropped[candidates[at]] = (mask >> at) & 1;
      forecasts_.push_back(simulate(step, dropped));
      least_peak_ = std::min(least_peak_, forecasts_.back().peak_bytes);
    }
  }

  int64_t least_peak() const { return least_peak_; }

  // Four from the least peak that can be reached to just below that of keeping everything.
  std::vector<int64_t> budgets() const {
    const int64_t range = forecasts_.front().peak_bytes - least_peak_;
    return {least_peak_, least_peak_ + range / 4, least_peak_ + range / 2,
            least_peak_ + range * 4 / 5};
  }

  double least_seconds(int64_t budget_bytes) const {
    double seconds = std::numeric_limits<double>::infinity();
    for (const Forecast& forecast : forecasts_) {
      if (forecast.peak_bytes <= budget_bytes) seconds = std::min(seconds, forecast.replay_seconds);
    }
    return seconds;
  }

 private:
  std::vector<Forecast> forecasts_;
  int64_t least_peak_ = std::numeric_limits<int64_t>::max();
};

TEST(RecomputePlanTest, IsWithinAFewPercentOfTheBestForChainsWithoutTryingEverySet) {
  std::mt19937 random(1);
  for (int seed = 0; seed < 250; ++seed) {
    const RecordedStep step = random_chain(random, 6 + seed % 7);
    const BruteForce best(step);
    for (const int64_t budget : best.budgets()) {
      const RecomputePlan plan = plan_recompute(step, budget, kSearchOnly);
      EXPECT_LE(plan.forecast.peak_bytes, budget);
      EXPECT_LE(plan.forecast.replay_seconds, 1.05 * best.least_seconds(budget) + 1e-9)
          << "chain " << seed << ", budget " << budget;
    }
  }
}

TEST(RecomputePlanTest, IsTheBestForAnyGraphOfFewCandidates) {
  std::mt19937 random(2);
  for (int seed = 0; seed < 250; ++seed) {
    const RecordedStep step = random_graph(random, 4 + seed % 12, 2 + seed % 9);
    const BruteForce best(step);
    for (const int64_t budget : best.budgets()) {
      const RecomputePlan plan = plan_recompute(step, budget);
      EXPECT_LE(plan.forecast.peak_bytes, budget);
      EXPECT_LE(plan.forecast.replay_seconds, best.least_seconds(budget) + 1e-9)
          << "graph " << seed << ", budget " << budget;
    }
    EXPECT_NE(error_of([&] { plan_recompute(step, best.least_peak() - 1); }), "");
  }
}

// Bounds on what the search has reached, not promises.
TEST(RecomputePlanTest, IsNearTheBestForMostGraphsWithoutTryingEverySet) {
  std::mt19937 random(4);
  int plans = 0;
  int refused = 0;
  double ratios = 0;
  for (int seed = 0; seed < 150; ++seed) {
    const RecordedStep step = random_graph(random, 14, 10);
    const BruteForce best(step);
    for (const int64_t budget : best.budgets()) {
      RecomputePlan plan;
      if (!error_of([&] { plan = plan_recompute(step, budget, kSearchOnly); }).empty()) {
        ++refused;
        continue;
      }
      ++plans;
      // The tenth is that of the cheapest operator, for where the best is free.
      ratios += (plan.forecast.replay_seconds + 0.1) / (best.least_seconds(budget) + 0.1);
    }
  }
  EXPECT_LE(refused, 7);
  EXPECT_LE(ratios / plans, 1.01);
}

// A graph has less structure than the search looks for: what it promises is a plan that fits or a
// refusal that names a budget which is accepted.
TEST(RecomputePlanTest, FitsOrNamesABudgetThatIsAcceptedForAnyGraph) {
  std::mt19937 random(3);
  for (int seed = 0; seed < 100; ++seed) {
    const RecordedStep step = random_graph(random, 20 + seed, 10 + seed / 2);
    const int64_t kept_bytes = kept_peak(step);
    for (const int64_t percent : {10, 40, 60, 80}) {
      int64_t budget = kept_bytes * percent / 100;
      RecomputePlan plan;
      const std::string words = error_of([&] { plan = plan_recompute(step, budget, kSearchOnly); });
      if (!words.empty()) {
        const std::string before = "expected at least ";
        const size_t figure = words.find('(', words.find(before)) + 1;
        budget = std::stoll(words.substr(figure));
        ASSERT_GT(budget, kept_bytes * percent / 100);
        plan = plan_recompute(step, budget, kSearchOnly);
      }
      EXPECT_LE(plan.forecast.peak_bytes, budget);
      const Forecast again = simulate(step, plan.dropped);
      EXPECT_EQ(again.peak_bytes, plan.forecast.peak_bytes);
      EXPECT_EQ(again.replay_seconds, plan.forecast.replay_seconds);
      EXPECT_EQ(again.replays, plan.forecast.replays);
    }
  }
}

TEST(RecomputePlanTest, DropsNothingWhereEverythingFits) {
  const RecordedStep step = transformer(4);
  const RecomputePlan plan = plan_recompute(step, kept_peak(step));
  EXPECT_EQ(plan.dropped, nothing(step));
  EXPECT_EQ(plan.forecast.replay_seconds, 0);
  EXPECT_EQ(plan.simulations, 1U);
  EXPECT_NE(plan_recompute(step, kept_peak(step) - 1).dropped, nothing(step));
}

TEST(RecomputePlanTest, RecomputesCheapOperatorsFirst) {
  const RecordedStep step = transformer(32);
  const RecomputePlan plan = plan_recompute(step, kept_peak(step) * 60 / 100);
  EXPECT_EQ(replayed_seconds(step, plan.forecast, {"qkv", "projection", "up", "down"}), 0);
  EXPECT_GT(replayed_seconds(step, plan.forecast, {"norm", "attention", "gelu"}), 0);
}

TEST(RecomputePlanTest, CostsAFewPercentOfATransformersStep) {
  const size_t blocks = 32;
  const RecordedStep step = transformer(blocks);
  const double step_seconds = 3 * kBlockSeconds * blocks;
  const std::vector<std::pair<int64_t, double>> bounds = {{60, 0.01}, {50, 0.06}, {40, 0.10},
                                                          {30, 0.16}, {20, 0.18}, {10, 0.24}};
  for (const auto& [percent, most] : bounds) {
    const int64_t budget = kept_peak(step) * percent / 100;
    const RecomputePlan plan = plan_recompute(step, budget);
    EXPECT_LE(plan.forecast.peak_bytes, budget);
    EXPECT_LE(plan.forecast.replay_seconds, most * step_seconds) << percent << " %";
  }
}

// For 400 layers that is 20 anchors and 20 layers between two of them, and what lingers.
TEST(RecomputePlanTest, TakesTwiceTheSquareRootOfAChain) {
  for (const bool through_passing : {false, true}) {
    for (const size_t count : {1U, 2U, 3U}) {
      const RecordedStep step = streams(count, 400, 1, through_passing);
      EXPECT_EQ(kept_peak(step), static_cast<int64_t>(400 * count));
      const auto budget = static_cast<int64_t>(44 * count);
      const std::string words = error_of([&] { plan_recompute(step, budget); });
      EXPECT_EQ(words, "") << count << " streams";
    }
  }
}

TEST(RecomputePlanTest, DropsFirstWhatBackwardNeverNeeds) {
  RecordedStep step = streams(1, 40, 1, false);
  for (RecordedOperator& op : step.operators) op.inputs = {0};
  for (Tick& tick : step.ticks) {
    if (tick.event == Event::kNeed && tick.value % 2 == 0) tick.event = Event::kRelease;
  }
  EXPECT_EQ(plan_recompute(step, 24).forecast.replay_seconds, 0);
}

// Values that do not depend on each other: the bound is that of the knapsack of fractions.
TEST(RecomputePlanTest, IsNearTheBoundForManyValuesOfWhichNoTwoAreAlike) {
  std::mt19937 random(5);
  SyntheticStep independent;
  const size_t source = independent.leaf(0);
  std::vector<std::pair<double, double>> byte_seconds_and_bytes;
  for (int at = 0; at < 1500; ++at) {
    const auto bytes = static_cast<int64_t>(1000 + random() % 9000);
    const double seconds = 1 + 0.001 * static_cast<double>(random() % 9000);
    independent.save(independent.run(std::to_string(at), seconds, {source}, bytes));
    byte_seconds_and_bytes.emplace_back(seconds / static_cast<double>(bytes), bytes);
  }
  std::sort(byte_seconds_and_bytes.begin(), byte_seconds_and_bytes.end());
  const RecordedStep step = independent.finish(0);
  for (const int64_t percent : {90, 60, 30}) {
    const int64_t budget = kept_peak(step) * percent / 100;
    auto left_bytes = static_cast<double>(kept_peak(step) - budget);
    double bound_seconds = 0;
    for (const auto& [byte_seconds, bytes] : byte_seconds_and_bytes) {
      const double taken_bytes = std::min(left_bytes, bytes);
      bound_seconds += byte_seconds * taken_bytes;
      left_bytes -= taken_bytes;
    }
    const RecomputePlan plan = plan_recompute(step, budget);
    EXPECT_LE(plan.forecast.replay_seconds, 1.02 * bound_seconds) << percent << " %";
  }
}

// 7 % needs residual values dropped: were all of them, the first replay would bring back every
// block.
TEST(RecomputePlanTest, KeepsAnchorsInLongChains) {
  const RecordedStep step = transformer(64);
  const std::vector<bool> all = droppable_values(step);
  EXPECT_GT(simulate(step, all).peak_bytes, kept_peak(step) * 90 / 100);
  const int64_t budget = kept_peak(step) * 7 / 100;
  const RecomputePlan plan = plan_recompute(step, budget);
  EXPECT_LE(plan.forecast.peak_bytes, budget);
}

TEST(RecomputePlanTest, TakesAFewHundredSimulationsForManyLayers) {
  for (const int64_t percent : {80, 50, 20, 10, 7, 6}) {
    const RecordedStep step = transformer(64);
    size_t simulations = 0;
    error_of(
        [&] { simulations = plan_recompute(step, kept_peak(step) * percent / 100).simulations; });
    EXPECT_LE(simulations, 1000U) << percent << " %";
  }
}

TEST(RecomputePlanTest, IsTheSameEveryTime) {
  for (const int64_t percent : {55, 14}) {
    const RecordedStep step = transformer(24);
    const RecordedStep copy = transformer(24);
    const int64_t budget = kept_peak(step) * percent / 100;
    const RecomputePlan plan = plan_recompute(step, budget);
    const RecomputePlan again = plan_recompute(copy, budget);
    EXPECT_EQ(plan.dropped, again.dropped);
    EXPECT_EQ(plan.simulations, again.simulations);
  }
}

TEST(RecomputePlanTest, DropsTheEarliestOfEqualValues) {
  const RecordedStep step = transformer(8);
  const RecomputePlan plan = plan_recompute(step, kept_peak(step) * 80 / 100);
  // [blocks], gelu's outputs.
  std::vector<bool> dropped;
  for (size_t value = 0; value < step.values.size(); ++value) {
    const size_t producer = step.values[value].producer;
    if (producer != kLeaf && step.operators[producer].signature == "gelu") {
      dropped.push_back(plan.dropped[value]);
    }
  }
  EXPECT_TRUE(dropped.front());
  EXPECT_FALSE(dropped.back());
}

TEST(RecomputePlanTest, KeepsWhatIsHeld) {
  RecordedStep step = transformer(8);
  const int64_t budget = kept_peak(step) * 70 / 100;
  for (RecordedValue& value : step.values) {
    const bool is_gelu =
        value.producer != kLeaf && step.operators[value.producer].signature == "gelu";
    if (is_gelu) value.retention = Retention::kHeld;
  }
  const RecomputePlan plan = plan_recompute(step, budget);
  EXPECT_LE(plan.forecast.peak_bytes, budget);
  EXPECT_EQ(replayed_seconds(step, plan.forecast, {"gelu"}), 0);
}

TEST(RecomputePlanTest, RefusesABudgetThatNothingFitsWithFigures) {
  const RecordedStep step = chain();
  // At tick 2 all three are there, kept or lingering: 80 + 3. Without value 1 no later tick has more.
  const std::string words = error_of([&] { plan_recompute(step, 50); });
  EXPECT_THAT(words,
              AllOf(HasSubstr("recompute plan: budget 50 B (50 bytes) of activations"),
                    HasSubstr("expected at least 83 B (83 bytes), the least peak that recompute "
                              "reaches; keeping everything takes 89 B"),
                    HasSubstr("raise the budget to that least peak, use a smaller micro-batch, or "
                              "offload")));
  const RecomputePlan plan = plan_recompute(step, 83);
  EXPECT_EQ(plan.forecast.peak_bytes, 83);
  EXPECT_EQ(plan.forecast.replay_seconds, 1);
}

TEST(RecomputePlanTest, AcceptsTheBudgetThatARefusalNames) {
  for (const size_t blocks : {3U, 16U, 40U}) {
    const RecordedStep step = transformer(blocks, 1);
    const std::string words = error_of([&] { plan_recompute(step, 1); });
    const size_t figure = words.find('(', words.find("expected at least")) + 1;
    const int64_t least = std::stoll(words.substr(figure));
    EXPECT_LT(least, kept_peak(step));
    EXPECT_EQ(plan_recompute(step, least).forecast.peak_bytes, least);
    EXPECT_THAT(error_of([&] { plan_recompute(step, least * 2 / 3); }),
                HasSubstr("(" + std::to_string(least) + " bytes), the least"));
  }
}

TEST(RecomputePlanTest, HasNothingToDropInAStepWithoutCandidates) {
  EXPECT_EQ(plan_recompute({}, 0).forecast.peak_bytes, 0);
  RecordedStep step = chain();
  for (RecordedOperator& op : step.operators) op.replayable = false;
  EXPECT_THAT(error_of([&] { plan_recompute(step, 88, kSearchOnly); }), HasSubstr("89 bytes"));
}

}  // namespace
}  // namespace zeropage::checkpointing::recompute_plan_test
