// `zp topology` as users type it.
#include "tests/examples/train_gpt_run.h"

namespace topology_command_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

nlohmann::json topology(const std::string& flags, const std::string& before = "") {
  const Outcome outcome = shell(before + " " ZP " topology --buffer 4 --json " + flags);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  return nlohmann::json::parse(outcome.output);
}

TEST(TopologyCommandTest, ShowsEveryRanksCoresAndThatMemoryLiesWhereTheyAre) {
  const auto found = topology("--ranks 2");
  const size_t cores = found["cores"].size();
  ASSERT_EQ(found["ranks"].size(), 2U);
  size_t given = 0;
  for (const auto& rank : found["ranks"]) {
    given += rank["cores"].size();
    const auto& placement = rank["placement"];
    EXPECT_EQ(placement["bytes"], 4 << 20);
    EXPECT_GT(placement["copy_bytes_per_second"], 1e6);
    if (placement.contains("bytes_by_node")) {
      EXPECT_EQ(placement["on_the_cores_nodes"], true);
      EXPECT_EQ(placement["bytes_by_node"][std::to_string(rank["node"].get<int>())], 4 << 20);
    } else {
      EXPECT_THAT(placement["verdict"].get<std::string>(), HasSubstr("move_pages"));
    }
  }
  EXPECT_EQ(given, std::max<size_t>(cores, 2));
  EXPECT_GT(found["memory"]["usable_bytes"], 0);
  EXPECT_GE(found["packages"], 1);
}

TEST(TopologyCommandTest, KnowsTheCoresThatItWasGivenAndALaunchersRanks) {
  const auto found = topology("", "LOCAL_WORLD_SIZE=3 taskset -c 0");
  EXPECT_EQ(found["cores"].size(), 1U);
  ASSERT_EQ(found["ranks"].size(), 3U);
  for (const auto& rank : found["ranks"]) EXPECT_EQ(rank["cpus"], "0");
}

TEST(TopologyCommandTest, SaysItInWordsToo) {
  const Outcome outcome = shell(ZP " topology --buffer 4");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("NUMA nodes\nnode 0: "));
  EXPECT_THAT(outcome.output, HasSubstr(" usable (MemAvailable "));
  EXPECT_THAT(outcome.output, HasSubstr("\nrank 0: "));
}

TEST(TopologyCommandTest, RefusesBadCommandLinesInOneLine) {
  expect_refused(shell(ZP " topology --ranks 0"), "--ranks");
  expect_refused(shell(ZP " topology --buffer x"), "--buffer");
  expect_refused(shell(ZP " topology -- program"), "takes no program");
  expect_refused(shell("LOCAL_WORLD_SIZE=none " ZP " topology"), "LOCAL_WORLD_SIZE");
}

}  // namespace
}  // namespace topology_command_test
