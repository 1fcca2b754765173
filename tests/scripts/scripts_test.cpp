// The machine that searches for faults, and scripts that had one.
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scripts/random_script.h"
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

TEST(ScriptsTest, SayEachKindOfUnitAndEachActionWithinAThousandSeeds) {
  std::map<Kind, int> kinds;
  std::map<Does, int> actions;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const Script script = random_script(seed);
    for (const Unit& unit : script.units) ++kinds[unit.kind];
    for (const Action& action : script.actions) ++actions[action.does];
  }
  EXPECT_EQ(kinds.size(), static_cast<size_t>(Kind::kMasked) + 1);
  EXPECT_EQ(actions.size(), static_cast<size_t>(Does::kOwnLeftStep) + 1);
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
  EXPECT_THAT(compared(script, expected, {}).words, HasSubstr("only LibTorch's run has it"));
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

}  // namespace
}  // namespace zeropage::scripts::scripts_test
