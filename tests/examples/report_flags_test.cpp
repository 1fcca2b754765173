// `train_gpt --report`, `--trace` and `zp report` as users type them.
#include "tests/examples/train_gpt_run.h"

namespace report_flags_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using ::testing::Not;

class ReportFlagsTest : public TrainGptTest {
 protected:
  static Outcome report(const std::string& arguments) { return shell(ZP " report " + arguments); }

  // A profile of two ranks at stage 3, whose steps 2 and 3 were recorded.
  std::string profile(const std::string& name, const std::string& more = "") const {
    const Outcome outcome = train_gpt(
        tiny("--ranks 2 --stage 3 --profile-steps 2-3 --report " + path(name) + " " + more));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return path(name);
  }
};

TEST_F(ReportFlagsTest, WritesAPageAndATrace) {
  const Outcome outcome =
      train_gpt(tiny("--report " + path("run.html") + " --trace " + path("run.json")));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::string page = text_in(path("run.html"));
  EXPECT_THAT(page, HasSubstr("train_gpt at stage 1 on 1 rank"));
  EXPECT_THAT(page, Not(HasSubstr("http://")));
  EXPECT_THAT(page, Not(HasSubstr("https://")));
  EXPECT_LT(page.size(), 2'000'000U);
  const auto trace = nlohmann::json::parse(text_in(path("run.json")));
  EXPECT_GT(trace["traceEvents"].size(), 100U);
}

TEST_F(ReportFlagsTest, AProfileHasTheChosenStepsOfAllRanksAndTheirPages) {
  const auto found = nlohmann::json::parse(text_in(profile("run.profile.json")));
  EXPECT_EQ(found["format"], "zeropage-profile");
  ASSERT_EQ(found["ranks"].size(), 2U);
  for (const auto& rank : found["ranks"]) {
    ASSERT_EQ(rank["steps"].size(), 2U);
    EXPECT_EQ(rank["steps"][0]["step"], 2);
    EXPECT_GT(rank["steps"][1]["changes"]["bytes"].size(), 100U);
    EXPECT_GT(rank["steps"][1]["pages"]["page"].size(), 1U);
    EXPECT_GT(rank["formula"][0], 0);
  }
}

// A stage of two, and half of the slices.
TEST_F(ReportFlagsTest, TheFormulaIsOfWhatARankHasOfTheModel) {
  for (const std::string mesh : {"--pipeline 2 --accumulate 2", "--tensor 2"}) {
    SCOPED_TRACE(mesh);
    const auto of_run =
        run("--ranks 2 --stage 0 " + mesh + " --report " + path("run.profile.json"));
    const auto found = nlohmann::json::parse(text_in(path("run.profile.json")));
    for (const size_t rank : {0, 1}) {
      int64_t formula = 0;
      for (const int64_t bytes : found["ranks"][rank]["formula"]) formula += bytes;
      EXPECT_EQ(formula, of_run["memory"][rank]["formula_bytes"]) << rank;
    }
  }
}

TEST_F(ReportFlagsTest, TheTerminalShowsLinesTheTableAndTheDifference) {
  const std::string one = profile("one.json");
  const std::string other = profile("other.json", "--batch 4");
  const Outcome outcome = report(one + " " + other);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("█"));
  EXPECT_THAT(outcome.output, HasSubstr("at the peak"));
  EXPECT_THAT(outcome.output, HasSubstr("formula"));
  EXPECT_THAT(outcome.output, HasSubstr("Against \"train_gpt at stage 3 on 2 ranks\""));
  EXPECT_THAT(outcome.output, HasSubstr("+"));
}

TEST_F(ReportFlagsTest, AProfileBecomesAPageOfTwoRunsAndATrace) {
  const std::string one = profile("one.json");
  const Outcome outcome =
      report(one + " " + one + " -o " + path("two.html") + " -o " + path("one.trace.json"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(text_in(path("two.html")), HasSubstr("\"other\":"));
  EXPECT_THAT(text_in(path("one.trace.json")), HasSubstr("traceEvents"));
}

TEST_F(ReportFlagsTest, BadFilesAreToldInALine) {
  const std::string good = text_in(profile("one.json"));
  std::ofstream(path("cut.json")) << good.substr(0, good.size() / 2);
  std::string another = good;
  another.replace(another.find("\"version\":1"), 11, "\"version\":7");
  std::ofstream(path("another.json")) << another;
  const auto expect_error = [&](const std::string& arguments, const std::string& words) {
    const Outcome outcome = report(arguments);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(words));
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  };
  expect_error(path("cut.json"), "cut.json: the file ends in the middle, after ");
  expect_error(path("another.json"), "a profile of version 7, but this program reads version 1");
  expect_error(path("nothing.json"), "nothing.json: cannot be read");
  expect_error(path("one.json") + " -o page.txt", "expected a name that ends in .html");
}

TEST_F(ReportFlagsTest, FlagsThatMakeNoSenseAreRefused) {
  const std::string report_it = "--report " + path("run.html") + " ";
  expect_refused(train_gpt(tiny("--report run.txt")), "expected a name that ends in .html");
  expect_refused(train_gpt(tiny("--trace run.html")), "expected a name that ends in .json");
  expect_refused(train_gpt(tiny("--profile-steps 1-2")), "--profile-steps: is about what --report");
  expect_refused(train_gpt(tiny(report_it + "--profile-steps 2")), "such as 3-5");
  expect_refused(train_gpt(tiny(report_it + "--profile-steps 2-9")),
                 "expected steps from 1 to 3 (--steps)");
  expect_refused(train_gpt(tiny(report_it + "--communicator simulated")),
                 "the steps of a simulated run take no time");
}

TEST_F(ReportFlagsTest, MemoryProfilePutsEverySettingIntoOneTableAndOnePage) {
  const Outcome outcome = shell(MEMORY_PROFILE " --models lstm --page " + path("memory.html"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* row : {"lstm, stage 0 ", "lstm, stage 3, recomputed "}) {
    EXPECT_THAT(outcome.output, HasSubstr(row));
    EXPECT_THAT(text_in(path("memory.html")), HasSubstr(std::string(row).substr(0, 13)));
  }
  EXPECT_EQ(shell(MEMORY_PROFILE " --page memory.txt").exit_code, 2);
}

TEST_F(ReportFlagsTest, AReportThatCannotBeWrittenIsToldBeforeTheFirstStep) {
  const Outcome outcome = train_gpt(tiny("--ranks 2 --report /nowhere/run.html"));
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("parameters on 2 ranks")));
  EXPECT_THAT(outcome.output, HasSubstr("/nowhere/run.html: cannot be written"));
}

}  // namespace
}  // namespace report_flags_test
