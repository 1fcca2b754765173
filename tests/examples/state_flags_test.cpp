// train_gpt's --save and --resume, as users type them.
#include "tests/examples/train_gpt_run.h"

namespace state_flags_test {
namespace {

using namespace zeropage::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StateFlagsTest : public TrainGptTest {
 protected:
  std::string hash_of(const std::string& flags) { return run(flags)["weights_sha256"]; }

  const std::string run_folder_ = path("run");
};

TEST_F(StateFlagsTest, RefusesWhatIsNothingWithoutAnotherFlag) {
  expect_refused(train_gpt("--save-every 5"), "use --save DIR");
  expect_refused(train_gpt("--save-on-signal on"), "use --save DIR");
  expect_refused(train_gpt("--save x --keep-every 10"), "--keep-last");
  expect_refused(train_gpt("--resume-fall-back on"), "--resume DIR");
  expect_refused(train_gpt("--save x --save-every 0"), "--save-every");
  expect_refused(train_gpt("--save x --communicator simulated --ranks 2"), "simulated");
  expect_refused(train_gpt("--save x --offload-optimizer host --offload-step late"),
                 "--offload-step late");
}

// Else all its steps would be lost.
TEST_F(StateFlagsTest, AFolderThatCannotBeWrittenEndsTheRunBeforeItsFirstStep) {
  std::ofstream(path("file")) << "not a folder";
  const Outcome outcome =
      train_gpt(tiny("--ranks 2 --stage 3 --steps 100000 --save " + path("file") + "/run"));
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("/file: expected a folder, got something else"));
  EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("step 1")));
}

TEST_F(StateFlagsTest, ResumesAtAnotherStageAndNumberOfRanksWithTheSameBits) {
  const std::string split1 = "--world-invariant --ranks 1 --accumulate 4 ";
  const std::string split2 = "--world-invariant --ranks 2 --accumulate 2 ";
  const std::string expected = hash_of(split1 + "--stage 0 --steps 6");
  run(split2 + "--stage 3 --steps 4 --save-every 2 --save " + run_folder_);
  EXPECT_EQ(hash_of(split1 + "--stage 1 --steps 6 --resume " + run_folder_), expected);
  EXPECT_EQ(hash_of(split2 + "--stage 2 --steps 6 --offload-optimizer host --resume " +
                    run_folder_ + "/step-2"),
            expected);
}

TEST_F(StateFlagsTest, ResumesDropoutLossScaleAndSpikesWithTheSameBits) {
  const std::string flags =
      "--ranks 2 --stage 2 --dropout 0.1 --compute-dtype fp16 --accumulate 2 --spike-z 6 ";
  const std::string expected = hash_of(flags + "--steps 6");
  run(flags + "--steps 3 --save " + run_folder_);
  EXPECT_EQ(hash_of(flags + "--steps 6 --resume " + run_folder_), expected);
}

TEST_F(StateFlagsTest, GoesOnAfterKillMinus9WithTheSameBits) {
  const std::string expected = hash_of("--ranks 2 --stage 3 --steps 30");
  // Killed as soon as a state of ten steps is there; the run would go on for long.
  const Outcome killed =
      shell(std::string(TRAIN_GPT) +
            " --d-model 32 --layers 2 --heads 2 --sequence 32 --batch 2 --threads 1 --ranks 2 "
            "--stage 3 --steps 100000 --save-every 10 --keep-last 1000000 --save " +
            run_folder_ + " >/dev/null 2>&1 & pid=$!; while [ ! -e " + run_folder_ +
            "/step-10 ]; do sleep 0.05; done; kill -9 $pid; wait $pid");
  EXPECT_EQ(killed.exit_code, 137) << killed.output;
  EXPECT_EQ(hash_of("--ranks 2 --stage 3 --steps 30 --resume " + run_folder_ + "/step-10"),
            expected);
}

TEST_F(StateFlagsTest, SavesAndEndsOnSigtermAndOnCtrlC) {
  for (const std::string signal : {"TERM", "INT"}) {
    std::filesystem::remove_all(run_folder_);
    // A shell's jobs in the background ignore SIGINT.
    const Outcome ended =
        shell("env --default-signal=INT " + std::string(TRAIN_GPT) +
              " --d-model 32 --layers 2 --heads 2 --sequence 32 --batch 2 --threads 1 --ranks 2 "
              "--steps 100000 --save-every 10 --keep-last 2 --save-on-signal on --save " +
              run_folder_ + " & pid=$!; while [ ! -e " + run_folder_ +
              "/latest ]; do sleep 0.05; done; kill -" + signal + " $pid; wait $pid");
    EXPECT_THAT(ended.output, HasSubstr("SIG" + signal + ": ended after a save"));
    const Outcome found = shell(ZP " state inspect --json " + run_folder_);
    const auto state = nlohmann::json::parse(found.output);
    EXPECT_GE(state["step"], 10);
  }
}

TEST_F(StateFlagsTest, RefusesAStateOfAnotherRunOrNoneAtAll) {
  run("--steps 2 --save " + run_folder_);
  const auto expect_error = [&](const std::string& flags, const std::string& words) {
    const Outcome outcome = train_gpt(tiny(flags + " --resume " + run_folder_));
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(words));
  };
  expect_error("--steps 2", "raise --steps");
  expect_error("--steps 3 --seed 5", "its run has seed \"0\", this one \"5\"");
  expect_error("--steps 3 --d-model 64", "it is of another model");
  expect_error("--steps 3 --optimizer adagrad", "expected the state of torch::optim::Adagrad");
  std::filesystem::remove(run_folder_ + "/latest");
  std::filesystem::resize_file(run_folder_ + "/step-2/weights.safetensors", 5000);
  expect_error("--steps 3", "weights.safetensors: byte 5000: expected");
}

TEST_F(StateFlagsTest, RefusesAFolderWithNewerStatesOfAnotherRunBeforeTheFirstStep) {
  run("--steps 4 --save " + run_folder_);
  const Outcome outcome = train_gpt(tiny("--steps 6 --save " + run_folder_));
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("has step-4 of another run; give --resume " + run_folder_));
  EXPECT_EQ(run("--steps 6 --resume " + run_folder_ + " --save " + run_folder_)["first_step"], 4);
}

TEST_F(StateFlagsTest, WritesWhatEverySaveTook) {
  const auto figures = run("--steps 4 --save-every 2 --save-async off --save " + run_folder_);
  ASSERT_EQ(figures["saves"].size(), 2U);
  EXPECT_EQ(figures["saves"][1]["step"], 4);
  EXPECT_GT(figures["saves"][1]["bytes"], 10000);
  EXPECT_GT(figures["saves"][1]["seconds"], 0);
  EXPECT_EQ(run("--steps 5 --resume " + run_folder_)["first_step"], 4);
}

}  // namespace
}  // namespace state_flags_test
