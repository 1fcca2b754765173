// The machine that searches for faults, and scripts that had one.
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scripts/our_side.h"
#include "tests/scripts/random_script.h"
#include "tests/scripts/shrink.h"
#include "tests/scripts/twin.h"
#include "tests/scripts/verdict.h"

namespace zeropage::scripts::scripts_test {
namespace {

using ::testing::HasSubstr;

std::string text_of(const std::string& path) {
  std::ifstream in(std::string(ZEROPAGE_SOURCE_DIR "/") + path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(ScriptsTest, OfASeedAreTheSameAndSurviveAsText) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const std::string text = to_text(random_script(seed));
    EXPECT_EQ(text, to_text(random_script(seed)));
    EXPECT_EQ(text, to_text(script_of(text)));
  }
}

// What a thousand seeds say, by number.
struct Said {
  std::set<Kind> kinds;
  std::set<Does> actions;
  std::set<Values> values;
  std::set<Beside> beside;
  std::set<Kept> kept;
  std::set<Tier> optimizers, parameters;
  std::set<ReduceMicroSteps> reduced;
  std::set<StateFormat> states;
  std::set<StepWhen> whens;
  std::set<ScheduleKind> orders;  // of pipelines
  std::set<int> experts;
  std::set<int> pipelines;
  std::set<bool> alone;
  std::set<std::pair<int, bool>> contexts;  // ranks of it, and whether by heads
  std::set<LowPrecisionUpdate> masters;
  std::set<Reshard> stays;
  std::set<bool> sends_floats, keeps_low, is_world_invariant, autocasts, is_by_class, saves_aside,
      parks;
  std::set<int64_t> prefetch_bytes, minimum_sharded_bytes, offloaded_bytes, gradient_budgets;
  std::set<int> secondary_shards;

  void add(const Script& script) {
    for (const Unit& unit : script.units) kinds.insert(unit.kind);
    for (const Action& action : script.actions) actions.insert(action.does);
    values.insert(script.values);
    beside.insert(script.beside);
    states.insert(script.states);
    masters.insert(script.masters);
    sends_floats.insert(script.sends_floats);
    keeps_low.insert(script.keeps_low);
    is_world_invariant.insert(script.is_world_invariant);
    autocasts.insert(script.autocasts);
    whens.insert(when_of(script));
    for (const Setting& setting : script.settings) {
      kept.insert(setting.kept);
      stays.insert(setting.stays);
      is_by_class.insert(setting.is_by_class);
      saves_aside.insert(setting.saves_aside);
      parks.insert(setting.parks);
      prefetch_bytes.insert(setting.prefetch_bytes);
      minimum_sharded_bytes.insert(setting.minimum_sharded_bytes);
      secondary_shards.insert(setting.secondary_shard_within);
      offloaded_bytes.insert(setting.offloaded_bytes);
      gradient_budgets.insert(setting.gradient_budget_bytes);
      optimizers.insert(setting.optimizer);
      parameters.insert(setting.parameters);
      reduced.insert(setting.reduced);
      experts.insert(setting.expert);
      pipelines.insert(setting.pipeline);
      alone.insert(setting.is_alone);
      contexts.insert({setting.context, setting.is_by_heads});
      if (setting.pipeline > 1) orders.insert(setting.order);
    }
  }
};

TEST(ScriptsTest, SayEachWordWithinAThousandSeeds) {
  Said said;
  for (uint64_t seed = 0; seed < 1000; ++seed) said.add(random_script(seed));
  EXPECT_EQ(said.kinds.size(), static_cast<size_t>(Kind::kTiled) + 1);
  EXPECT_EQ(said.actions.size(), static_cast<size_t>(Does::kOwnLeftStep) + 1);
  EXPECT_EQ(said.values.size(), static_cast<size_t>(Values::kHalf) + 1);
  EXPECT_EQ(said.beside.size(), static_cast<size_t>(Beside::kTwin) + 1);
  EXPECT_EQ(said.kept.size(), static_cast<size_t>(Kept::kOnNvme) + 1);
  EXPECT_EQ(said.optimizers.size(), static_cast<size_t>(Tier::kNvme) + 1);
  EXPECT_EQ(said.parameters.size(), static_cast<size_t>(Tier::kNvme) + 1);
  EXPECT_EQ(said.reduced.size(), static_cast<size_t>(ReduceMicroSteps::kOnce) + 1);
  EXPECT_EQ(said.orders.size(), static_cast<size_t>(ScheduleKind::kZeroBubble) + 1);
  EXPECT_EQ(said.states.size(), static_cast<size_t>(StateFormat::k8Bit) + 1);
  EXPECT_EQ(said.masters.size(), static_cast<size_t>(LowPrecisionUpdate::kStochasticRounding) + 1);
  EXPECT_EQ(said.stays.size(), static_cast<size_t>(Reshard::kAfterStep) + 1);
  EXPECT_EQ(said.sends_floats.size(), 2U);
  EXPECT_EQ(said.keeps_low.size(), 2U);
  EXPECT_EQ(said.is_world_invariant.size(), 2U);
  EXPECT_EQ(said.autocasts.size(), 2U);
  EXPECT_EQ(said.is_by_class.size(), 2U);
  EXPECT_EQ(said.saves_aside.size(), 2U);
  EXPECT_EQ(said.parks.size(), 2U);
  EXPECT_EQ(said.prefetch_bytes.size(), 3U);
  EXPECT_EQ(said.minimum_sharded_bytes.size(), 3U);
  EXPECT_EQ(said.secondary_shards.size(), 2U);
  EXPECT_EQ(said.offloaded_bytes.size(), 3U);
  EXPECT_EQ(said.gradient_budgets.size(), 3U);
  EXPECT_EQ(said.whens.size(), static_cast<size_t>(StepWhen::kOneStepLate) + 1);
  EXPECT_EQ(said.alone.size(), 2U);
  EXPECT_EQ(said.contexts, (std::set<std::pair<int, bool>>{{1, false}, {2, false}, {2, true}}));
  EXPECT_EQ(said.experts, (std::set<int>{1, 2, 4}));
  EXPECT_EQ(said.pipelines, (std::set<int>{1, 2, 3}));
}

TEST(ScriptsTest, CutPipelinesOnlyWhereTheEndsShareWhatNoneWrites) {
  Script script;
  script.units = {{Kind::kLinear, 0}, {Kind::kBatchNorm, 0}, {Kind::kLinear, 0}, {Kind::kTied, 0}};
  const Setting two{.pipeline = 2}, three{.pipeline = 3};
  EXPECT_TRUE(can_be_cut(script, two));
  EXPECT_TRUE(can_be_cut(script, three));
  EXPECT_EQ(first_units_of(script, three), (std::vector<int64_t>{0, 1, 2, 4}));
  script.units[2] = {Kind::kShared, 0};
  EXPECT_TRUE(can_be_cut(script, two));
  script.units[2] = {Kind::kShared, 1};
  EXPECT_FALSE(can_be_cut(script, two));  // whose statistics both ends would write
  script.units = {{Kind::kLinear, 0}, {Kind::kTied, 0}, {Kind::kLinear, 0}};
  EXPECT_FALSE(can_be_cut(script, three));  // the rank in the middle
  EXPECT_FALSE(can_be_cut(script, {.pipeline = 2, .chunks = 2}));
}

TEST(ScriptsTest, HaveATwinWithTheSameRanksAlongDataAndNoMoreThanThat) {
  Script script;
  script.units = {{Kind::kLinear, 0}, {Kind::kLinear, 0}};
  script.settings = {{.stage = 3,
                      .data = 2,
                      .pipeline = 2,
                      .order = ScheduleKind::kZeroBubble,
                      .optimizer = Tier::kNvme,
                      .kept = Kept::kOnHost}};
  Setting twin = twin_of(script).settings.front();
  EXPECT_EQ(twin.stage, 0);
  EXPECT_EQ(twin.ranks(), 2);
  EXPECT_EQ(twin.data, 2);
  EXPECT_EQ(twin.optimizer, Tier::kDevice);
  EXPECT_EQ(twin.kept, Kept::kAll);
  script.units[1] = {Kind::kTied, 0};
  EXPECT_EQ(twin_of(script).settings.front().pipeline, 2);
}

// More of them run in CI, from a seed of the day.
TEST(ScriptsTest, DoWhatLibTorchDoesOrAreRefused) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const Script script = random_script(seed);
    const Verdict verdict = verdict_of(script);
    EXPECT_FALSE(verdict.is_fault()) << verdict.words << "\n" << to_text(script);
  }
}

// Each was a wrong result without a word, and was found by random_scripts, which made it so small.
TEST(ScriptsTest, ThatHadAFaultHaveNone) {
  std::istringstream lines(text_of("tests/scripts/found.jsonl"));
  std::string line;
  int count = 0;
  while (std::getline(lines, line)) {
    const Verdict verdict = verdict_of(script_of(line));
    EXPECT_FALSE(verdict.is_fault()) << verdict.words << "\n" << line;
    ++count;
  }
  EXPECT_GT(count, 0);
}

TEST(ScriptsTest, WhoseRankDoesSomethingAloneMustBeRefusedInWordsThatTheDocsHave) {
  Script script;
  script.units = {{Kind::kLinear, 0}};
  script.settings = {{.stage = 1, .data = 2}};
  script.actions = {{Does::kOwnWrite, 0, 0.5}, {Does::kBackward, 0, 1}, {Does::kStep, 0, 1}};
  const Verdict verdict = verdict_of(script);
  EXPECT_EQ(verdict.is, Verdict::Is::kRefused) << verdict.words;
  for (const Refusal& refusal : refusals()) {
    EXPECT_THAT(text_of(refusal.page), HasSubstr(refusal.words));
  }
}

TEST(ScriptsTest, AreDifferentWhereOneValueIs) {
  const Script script = random_script(1);
  const torch::Tensor value = torch::ones({2, 3}, torch::kDouble);
  torch::Tensor other = value.clone();
  other[1][2] += 1e-5;
  const Observations expected = {{"action 0, norm", value}};
  EXPECT_FALSE(compared(script, expected, {{"action 0, norm", value}}).is_fault());
  EXPECT_THAT(compared(script, expected, {{"action 0, norm", other}}).words,
              HasSubstr("action 0, norm: expected 1, 1, 1, 1, ..., got 1, 1, 1, 1"));
  EXPECT_TRUE(compared(script, expected, {{"action 0, norm", value.t()}}).is_fault());
  EXPECT_THAT(compared(script, expected, {}).words, HasSubstr("only the other run has it"));
}

TEST(ScriptsTest, WithATwinAreDifferentWhereOneBitIs) {
  Script script = random_script(1);
  const torch::Tensor value = torch::ones({2}, torch::kDouble);
  const Observations expected = {{"action 0, norm", value}};
  const Observations got = {{"action 0, norm", value + 1e-15}};
  script.beside = Beside::kLibTorch;
  EXPECT_FALSE(compared(script, expected, got).is_fault());
  script.beside = Beside::kTwin;
  EXPECT_TRUE(compared(script, expected, got).is_fault());
  EXPECT_FALSE(compared(script, expected, expected).is_fault());
}

TEST(ScriptsTest, AreDifferentWhereOneOfTwoRanksIs) {
  const Script script = random_script(1);
  const torch::Tensor value = torch::ones({2}, torch::kDouble);
  const Observations expected = {{"action 0, u0.weight", value}};
  const Observations got = {{"action 0, u0.weight", value}, {"action 0, u0.weight", value * 2}};
  EXPECT_TRUE(compared(script, expected, got).is_fault());
  EXPECT_THAT(compared(script, {}, expected).words, HasSubstr("the other run does not have it"));
}

TEST(ScriptsTest, TellApartARankThatFailsAndThoseThatLoseIt) {
  EXPECT_TRUE(
      is_a_consequence("[rank 0/2] all_reduce #3: lost rank 1: it has ended or was killed"));
  EXPECT_FALSE(is_a_consequence("[rank 1/2] page 0: expected 16 elements, got 8"));
}

TEST(ScriptsTest, AreMadeAsSmallAsTheFaultAllows) {
  Script script = random_script(3);
  script.units.push_back({Kind::kGru, 0});
  script.actions.push_back({Does::kEvaluate, 0, 1});
  // The fault: each evaluation of a GRU at two ranks or more.
  const auto is_still = [](const Script& of) {
    const auto has_gru = std::any_of(of.units.begin(), of.units.end(),
                                     [](const Unit& unit) { return unit.kind == Kind::kGru; });
    const auto evaluates =
        std::any_of(of.actions.begin(), of.actions.end(),
                    [](const Action& action) { return action.does == Does::kEvaluate; });
    return has_gru && evaluates && of.settings.front().data > 1;
  };
  script.settings.front().data = 4;
  const Script least = shrunk(script, is_still);
  EXPECT_EQ(least.units.size(), 1U);
  EXPECT_EQ(least.actions.size(), 1U);
  EXPECT_EQ(least.settings.size(), 1U);
  EXPECT_EQ(least.settings.front().data, 2);
  EXPECT_EQ(least.settings.front().stage, 0);
}

TEST(ScriptsTest, KeepTheStepThatHasToNoticeWhatOneRankDidAlone) {
  Script script;
  script.actions = {{Does::kOwnWrite, 0, 0.5}, {Does::kBackward, 0, 1}, {Does::kStep, 0, 1}};
  EXPECT_TRUE(can_be_noticed(script));
  script.actions.pop_back();
  EXPECT_FALSE(can_be_noticed(script));
  script.actions = {{Does::kBackward, 0, 1}};
  EXPECT_TRUE(can_be_noticed(script));
}

TEST(ScriptsTest, WithAPipelineAreMadeAsSmallAsTheFaultAllows) {
  Script script = random_script(3);
  script.values = Values::kFloat;
  script.accumulation = {.is_on = true, .weighs = true, .clip_norm = 1};
  script.settings = {{.stage = 3,
                      .data = 2,
                      .pipeline = 3,
                      .chunks = 2,
                      .order = ScheduleKind::kInterleaved,
                      .is_deferred = true,
                      .optimizer = Tier::kNvme,
                      .parameters = Tier::kNvme,
                      .reduced = ReduceMicroSteps::kEach}};
  script.actions = {{Does::kMicroBatches, 6, 1}, {Does::kStep, 0, 1}};
  // The fault: two micro-batches through a pipeline.
  const auto is_still = [](const Script& of) {
    return of.settings.front().pipeline > 1 && !of.actions.empty() &&
           of.actions.front().does == Does::kMicroBatches && of.actions.front().which > 1;
  };
  const Script least = shrunk(script, is_still);
  const Setting& setting = least.settings.front();
  EXPECT_EQ(least.actions.size(), 1U);
  EXPECT_EQ(least.actions.front().which, 2);
  EXPECT_EQ(least.values, Values::kDouble);
  EXPECT_FALSE(least.accumulation.weighs);
  EXPECT_EQ(least.accumulation.clip_norm, 0);
  EXPECT_EQ(setting.pipeline, 2);
  EXPECT_EQ(setting.chunks, 1);
  EXPECT_EQ(setting.order, ScheduleKind::kGPipe);
  EXPECT_EQ(setting.data, 1);
  EXPECT_EQ(setting.optimizer, Tier::kDevice);
  EXPECT_EQ(setting.parameters, Tier::kDevice);
  EXPECT_EQ(setting.reduced, ReduceMicroSteps::kAuto);
  EXPECT_FALSE(setting.is_deferred);
}

}  // namespace
}  // namespace zeropage::scripts::scripts_test
