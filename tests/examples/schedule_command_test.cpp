// `zp schedule` as users type it.
#include <fstream>
#include <sstream>

#include "tests/examples/train_gpt_run.h"
#include "tests/harness/disk_folder.h"

namespace schedule_command_test {
namespace {

using namespace zeropage::testing;
using nlohmann::json;
using ::testing::HasSubstr;

const std::string kEight = ZP " schedule --pipeline 4 --micro-batches 8 ";

json simulated(const std::string& flags) {
  const Outcome outcome = shell(kEight + "--json " + flags);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  return json::parse(outcome.output);
}

TEST(ScheduleCommandTest, TellsStepBubbleAndActivations) {
  const Outcome outcome = shell(kEight + "--schedule 1f1b");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.output,
            "1f1b, 4 ranks, 8 micro-batches\n"
            "step: 33 s simulated\n"
            "bubble: 27.3 % of the ranks' time\n"
            "most activations held, in micro-batches: rank 0 4, rank 1 3, rank 2 2, rank 3 1\n");
  // The chunks of a rank share its time.
  EXPECT_EQ(simulated("--schedule interleaved --chunks 4")["makespan_s"], 24 + 9.0 / 4);
  EXPECT_EQ(simulated("--schedule zero-bubble")["makespan_s"], 27);
  EXPECT_EQ(simulated("--schedule gpipe --durations 2,1,0")["makespan_s"], 33);
  EXPECT_EQ(simulated("--schedule gpipe --transfer 0.5")["makespan_s"], 33 + 6 * 0.5);
}

TEST(ScheduleCommandTest, ThePictureOfTheDocumentationIsTheOneThatIsDrawn) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/1f1b.svg";
  EXPECT_EQ(shell(kEight + "--schedule 1f1b -o " + file).exit_code, 0);
  EXPECT_EQ(text_in(file), text_in(DOCS_FOLDER "/pipeline_1f1b.svg"))
      << "zp schedule --pipeline 4 --micro-batches 8 --schedule 1f1b -o docs/pipeline_1f1b.svg";
}

// "| `zero-bubble` | 20.0 % | 11.1 % | 3.0 % | 4 and 4 |"
std::string row_of(const std::string& schedule) {
  std::string row = "| `" + schedule + "` |";
  json eight;
  for (const char* micro_batches : {"4", "8", "32"}) {
    const Outcome outcome = shell(ZP " schedule --pipeline 4 --json --micro-batches " +
                                  std::string(micro_batches) + " --schedule " + schedule);
    const json step = json::parse(outcome.output);
    if (std::string(micro_batches) == "8") eight = step;
    char words[16];
    std::snprintf(words, sizeof words, " %.1f %% |", 100 * step["bubble"].get<double>());
    row += words;
  }
  std::ostringstream peaks;
  peaks << ' ' << eight["peak_activations"][0].get<double>() << " and "
        << eight["peak_activations"][3].get<double>() << " |";
  return row + peaks.str();
}

TEST(ScheduleCommandTest, TheTableOfTheDocumentationIsWhatIsSimulated) {
  const std::string page = text_in(DOCS_FOLDER "/pipelines.md");
  for (const char* schedule :
       {"gpipe", "1f1b", "interleaved --chunks 2", "interleaved --chunks 4", "zero-bubble"}) {
    EXPECT_THAT(page, HasSubstr(row_of(schedule)));
  }
}

TEST(ScheduleCommandTest, ThePictureHasABoxForEachActionAndKindsOfItsOwn) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/picture.svg";
  const auto boxes = [&](const std::string& flags, const std::string& box) {
    EXPECT_EQ(shell(kEight + flags + " -o " + file).exit_code, 0);
    const std::string picture = text_in(file);
    size_t found = 0;
    for (size_t at = picture.find(box); at != std::string::npos; at = picture.find(box, at + 1)) {
      ++found;
    }
    return found;
  };
  for (const char* box : {"class=\"box F", "class=\"box I", "class=\"box W"}) {
    EXPECT_EQ(boxes("--schedule zero-bubble", box), 32U);
  }
  EXPECT_EQ(boxes("--schedule interleaved --chunks 2", "class=\"box B later\""), 32U);
  EXPECT_EQ(boxes("--schedule interleaved --chunks 2", "prefers-color-scheme:dark"), 1U);
}

TEST(ScheduleCommandTest, ManyRanksAreReadableInATerminalAndInThePicture) {
  const DiskFolder folder;
  const std::string file = folder.path() + "/picture.svg";
  const Outcome outcome =
      shell(ZP " schedule --pipeline 16 --micro-batches 32 --schedule interleaved -o " + file);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) EXPECT_LT(line.size(), 80U) << line;
  EXPECT_THAT(outcome.output, HasSubstr("rank 15 8.5\n"));
  // Each of its 2048 actions has a box that tells which one it is.
  const std::string picture = text_in(file);
  for (const char* label : {">F0.0</text>", ">31.0</text>", ">31.1</text>"}) {
    size_t found = 0;
    for (size_t at = picture.find(label); at != std::string::npos;
         at = picture.find(label, at + 1)) {
      ++found;
    }
    EXPECT_GE(found, 16U) << label;
  }
  EXPECT_THAT(shell(ZP " schedule --pipeline 64 --micro-batches 8 --schedule gpipe").output,
              HasSubstr("in micro-batches: ranks 0-63 8\n"));
}

TEST(ScheduleCommandTest, AMeasuredStepIsComparedWithItsActionsWithoutDelay) {
  const DiskFolder folder;
  const std::string times = folder.path() + "/times.json";
  json step = simulated("--schedule 1f1b");
  std::ofstream(times) << step;
  EXPECT_THAT(shell(kEight + "--times " + times).output,
              HasSubstr("step: 33 s measured; 33 s simulated from the same actions, without any "
                        "other delay (1.000)"));
  EXPECT_THAT(shell(kEight + "--times " + times).output,
              HasSubstr("an action takes on average:\n  rank 0: forward 1 s, backward 2 s\n"));
  // All that follows the first action is late.
  for (auto& rank : step["ranks"]) {
    for (auto& action : rank) {
      for (const char* moment : {"begin_s", "end_s"}) {
        action[moment] = action[moment].get<double>() + 3.3;
      }
    }
  }
  std::ofstream(times) << step;
  const json late = simulated("--times " + times);
  EXPECT_NEAR(late["makespan_s"].get<double>(), 36.3, 1e-9);
  EXPECT_NEAR(late["simulated_makespan_s"].get<double>(), 33, 1e-9);
  EXPECT_EQ(late["measured"], true);
  ASSERT_EQ(late["mean_seconds"].size(), 4U);
  EXPECT_NEAR(late["mean_seconds"][3]["backward"].get<double>(), 2, 1e-9);
}

TEST(ScheduleCommandTest, RefusesWhatMakesNoSenseInOneLine) {
  const DiskFolder folder;
  const std::string times = folder.path() + "/times.json";
  std::ofstream(times) << simulated("--schedule gpipe");
  expect_refused(shell(ZP " schedule --pipeline 4"), "--micro-batches is required");
  expect_refused(shell(kEight + "--pipeline 0"), "--pipeline");
  expect_refused(shell(kEight + "--schedule dualpipe"), "--schedule");
  expect_refused(shell(ZP " schedule --pipeline 4 --micro-batches 3"),
                 "schedule 1f1b: expected at least 4 micro-batches");
  expect_refused(shell(ZP " schedule --pipeline 4 --micro-batches 6 --schedule interleaved"),
                 "in groups of 4");
  expect_refused(shell(kEight + "--chunks 2"), "several chunks need interleaved");
  expect_refused(shell(kEight + "--schedule interleaved --chunks 1"), "with one chunk take 1f1b");
  expect_refused(shell(kEight + "--durations 1,2"), "--durations");
  expect_refused(shell(kEight + "--durations 0,0,0"), "expected an action that takes time");
  expect_refused(shell(kEight + "--transfer -1"), "--transfer");
  expect_refused(shell(kEight + "--times " + times + " --transfer 1"), "excludes");
  expect_refused(shell(kEight + "--times " + times), "got gpipe; give --schedule");
  expect_refused(shell(kEight + "-- program"), "takes no program");
  expect_refused(shell(ZP " schedule --pipeline 4096 --micro-batches 65536"),
                 "expected at most 8000000 actions");
  expect_refused(
      shell(ZP " schedule --pipeline 64 --micro-batches 512 -o " + folder.path() + "/x.svg"),
      "a picture has room for 20000 actions");
}

TEST(ScheduleCommandTest, FilesThatCannotBeReadOrWrittenAreNamed) {
  Outcome outcome = shell(kEight + "-o /nowhere/x.svg");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("/nowhere/x.svg: cannot be written: No such file"));
  outcome = shell(kEight + "--times /nowhere/x.json");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("/nowhere/x.json: cannot be read: No such file"));
  outcome = shell(kEight + "--times /tmp");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("/tmp: cannot be read: Is a directory"));
  const DiskFolder folder;
  const std::string empty = folder.path() + "/empty.json";
  std::ofstream{empty};
  expect_refused(shell(kEight + "--times " + empty), "empty.json: expected JSON");
}

}  // namespace
}  // namespace schedule_command_test
