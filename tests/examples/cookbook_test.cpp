// The programs of examples/cookbook, run as users run them. COOKBOOK is what their paths begin with, ZP the launcher.
#include <fstream>
#include <sstream>

#include "tests/examples/cookbook_run.h"

namespace cookbook_test {
namespace {

using namespace cookbook_run;
using ::testing::HasSubstr;

class CookbookTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  const std::string folder_ = ::testing::TempDir() + "cookbook-" + std::to_string(::getpid());
};

TEST_F(CookbookTest, RunThatIsStoppedGoesOnAtAnotherNumberOfRanksWithTheLossesOfOneThatWasNot) {
  const std::string whole = shell(program("sharded_wrapper") + " " + folder_ + "/whole").output;
  ASSERT_EQ(figures_in(whole).size(), 5U) << whole;

  const std::string log = folder_ + "/log", run = folder_ + "/run";
  std::filesystem::create_directories(folder_);
  const Outcome stopped =
      shell(ranks(2) + program("sharded_wrapper") + " " + run + " >" + log +
            " 2>&1 & launcher=$!; until grep -q 'step  20' " + log +
            " || ! kill -0 $launcher 2>/dev/null; do sleep 0.01; done; kill -TERM $launcher; "
            "wait $launcher; code=$?; cat " +
            log + "; (exit $code)");
  EXPECT_EQ(stopped.exit_code, 128 + SIGTERM) << stopped.output;
  EXPECT_THAT(stopped.output, HasSubstr("stopped after step "));

  const Outcome again = shell(ranks(3) + program("sharded_wrapper") + " " + run);
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_THAT(again.output, HasSubstr("goes on from step "));
  expect_near(figures_in(stopped.output + again.output), figures_in(whole), kFp32);
}

TEST_F(CookbookTest, AxesThatAreNotTheWorldsAreToldByEachRank) {
  const Outcome outcome = shell(ranks(3) + program("pipeline") + " 2 1 1");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  for (const char* rank : {"[rank 0/3]", "[rank 1/3]", "[rank 2/3]"}) {
    EXPECT_THAT(outcome.output, HasSubstr(std::string(rank) + " Mesh: the axes \"pipeline\" 2"));
  }
}

TEST_F(CookbookTest, LimitThatIsTooSmallIsToldWithAdviceAndMetBySmallerMicroBatches) {
  const Outcome free = shell(program("low_memory"));
  EXPECT_EQ(free.exit_code, 0) << free.output;
  const Outcome limited = shell(program("low_memory") + " 1500KiB");
  EXPECT_EQ(limited.exit_code, 0) << limited.output;
  EXPECT_THAT(limited.output, HasSubstr("would pass the limit of device memory"));
  EXPECT_THAT(limited.output, HasSubstr("now in 2 pieces"));
  expect_near(figures_in(limited.output), figures_in(free.output), kBf16);
  const Outcome several = shell(ranks(2) + program("low_memory") + " 1700KiB");
  EXPECT_EQ(several.exit_code, 1) << several.output;
  EXPECT_THAT(several.output, HasSubstr("start again with 2 pieces"));
  const Outcome refused = shell(program("low_memory") + " 300KiB");
  EXPECT_EQ(refused.exit_code, 1) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("the model needs"));
}

// So that the page says how much a conversion is.
TEST_F(CookbookTest, LinesThatNameZeropageAreAsManyAsThePageSays) {
  const std::string folder = EXAMPLES_FOLDER;
  std::stringstream page;
  page << std::ifstream(folder + "/README.md").rdbuf();
  static const std::regex names("zeropage|\\bworld\\b");
  for (const char* const name : {"drop_in_optimizer", "sharded_wrapper", "low_memory",
                                 "tensor_parallel", "pipeline", "memory_in_ci"}) {
    std::ifstream source(folder + "/cookbook/" + name + ".cpp");
    int lines = 0, of_zeropage = 0;
    for (std::string line; std::getline(source, line);) {
      const size_t begin = line.find_first_not_of(' ');
      if (begin == std::string::npos || line.compare(begin, 2, "//") == 0) continue;
      ++lines;
      of_zeropage += std::regex_search(line, names) ? 1 : 0;
    }
    const std::string row = "| `" + std::string(name) + "` | " + std::to_string(of_zeropage) +
                            " | " + std::to_string(lines) + " |\n";
    EXPECT_THAT(page.str(), HasSubstr(row));
  }
}

TEST_F(CookbookTest, MemoryTestPassesAndFindsOutputsThatAreKept) {
  for (const std::string& launcher : {std::string(), ranks(3)}) {
    const Outcome passed = shell(launcher + program("memory_in_ci"));
    EXPECT_EQ(passed.exit_code, 0) << passed.output;
    const Outcome failed = shell(launcher + program("memory_in_ci") + " --keep-outputs");
    EXPECT_EQ(failed.exit_code, 1) << failed.output;
    EXPECT_THAT(failed.output, HasSubstr("a rank held more"));
  }
}

}  // namespace
}  // namespace cookbook_test
