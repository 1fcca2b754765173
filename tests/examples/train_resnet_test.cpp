// train_resnet, run as users run it, on images that this test draws.
#include <cstdint>

#include "tests/examples/train_gpt_run.h"

namespace zeropage::train_resnet_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainResnetTest : public TrainGptTest {
 protected:
  static constexpr int kTraining = 50;
  static constexpr int kTest = 7;

  void SetUp() override {
    TrainGptTest::SetUp();
    write("train", kTraining, 9);
    write("t10k", kTest, 9);
  }

  // Images of noise as Fashion-MNIST names them; labels from 0 to `most`.
  void write(const std::string& part, int count, int most) const {
    std::string pixels, labels;
    uint32_t noise = 1;
    for (int i = 0; i < count * 28 * 28; ++i) {
      noise = noise * 1664525U + 1013904223U;
      pixels += static_cast<char>(noise >> 24);
    }
    for (int i = 0; i < count; ++i) labels += static_cast<char>(i % (most + 1));
    std::ofstream(path(part + "-images-idx3-ubyte.gz"), std::ios::binary)
        << std::string({0, 0, 8, 3}) << number(count) << number(28) << number(28) << pixels;
    std::ofstream(path(part + "-labels-idx1-ubyte.gz"), std::ios::binary)
        << std::string({0, 0, 8, 1}) << number(count) << labels;
  }
  static std::string number(int value) {
    return {0, 0, static_cast<char>(value >> 8), static_cast<char>(value)};
  }

  Outcome run(const std::string& flags, const std::string& launcher = "") const {
    return run_program(launcher + command(flags));
  }
  std::string command(const std::string& flags) const {
    return std::string(TRAIN_RESNET) + " --data " + folder_.string() +
           " --width 4 --batch 12 --epochs 2 --threads 1 --report-every 1 " + flags;
  }
  static std::string weights(const Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    const size_t at = outcome.output.find("weights_sha256 ");
    EXPECT_NE(at, std::string::npos) << outcome.output;
    return at == std::string::npos ? "" : outcome.output.substr(at + 15, 64);
  }
};

TEST_F(TrainResnetTest, HasTheSameWeightsWhateverItsRanksAreAndAtEveryStage) {
  const Outcome processes = run("--ranks 2");
  EXPECT_THAT(processes.output, HasSubstr("step [1/4] epoch [1/2] loss "));
  EXPECT_THAT(processes.output, HasSubstr("test epoch [2/2] loss "));
  const std::string expected = weights(processes);
  EXPECT_EQ(weights(run("--ranks 2 --as-threads --stage 3 --loader-threads 3")), expected);
  EXPECT_EQ(weights(run("--stage 1 --loader-threads 0", std::string(ZP) + " run -n 2 -- ")),
            expected);
}

TEST_F(TrainResnetTest, GoesOnInMidEpochAlsoAtAnotherNumberOfRanks) {
  const std::string states = path("states");
  const std::string uninterrupted = weights(run("--ranks 2"));
  run("--ranks 2 --steps 3 --save " + states);
  const Outcome resumed = run("--ranks 2 --stage 2 --resume " + states);
  EXPECT_THAT(resumed.output, HasSubstr("step [4/4] epoch [1/2]"));
  EXPECT_THAT(resumed.output, Not(HasSubstr("step [3/4] epoch [1/2]")));
  EXPECT_EQ(weights(resumed), uninterrupted);

  const Outcome on_four = run("--ranks 4 --as-threads --resume " + states);
  EXPECT_EQ(on_four.exit_code, 0) << on_four.output;
  EXPECT_THAT(on_four.output, HasSubstr("step [4/4] epoch [1/2]"));
  EXPECT_THAT(on_four.output, Not(HasSubstr("step [3/4] epoch [1/2]")));
}

TEST_F(TrainResnetTest, SavesWhenSigtermComesAndGoesOnByItself) {
  const std::string flags = "--ranks 2 --save-every 1 --auto-resume --save " + path("states");
  const Outcome stopped =
      shell("sh -c '" + command(flags + " --pause 300") + " & pid=$!; while [ ! -e " +
            path("states/latest") +
            " ] && kill -0 $pid; do sleep 0.05; done; kill -TERM $pid; wait $pid'");
  EXPECT_EQ(stopped.exit_code, 143) << stopped.output;
  EXPECT_THAT(stopped.output, HasSubstr("SIGTERM: ended after the save of step"));
  EXPECT_THAT(stopped.output, Not(HasSubstr("weights_sha256")));
  const Outcome resumed = run(flags);
  EXPECT_THAT(resumed.output, HasSubstr("goes on after step "));
  EXPECT_EQ(weights(resumed), weights(run("--ranks 2")));
  EXPECT_EQ(weights(run(flags)), weights(resumed)) << "started once more, it has nothing to do";
}

TEST_F(TrainResnetTest, SavesWhenCtrlCComesAndEndsAtOnceAtTheSecond) {
  const std::string flags = "--ranks 2 --save-every 1 --save ";
  // A shell's jobs in the background ignore SIGINT.
  const auto stopped = [&](const std::string& folder, const std::string& pause,
                           const std::string& then) {
    // The file of another run would be read before the shell has emptied it.
    const std::string log = path(folder + ".log");
    return shell("sh -c 'env --default-signal=INT " + command(flags + path(folder) + pause) +
                 " > " + log + " 2>&1 & pid=$!; until grep -qs \"step .1/\" " + log +
                 " || ! kill -0 $pid; do sleep 0.05; done; kill -INT $pid; " + then + "wait $pid'");
  };
  const Outcome once = stopped("once", " --pause 300", "");
  EXPECT_EQ(once.exit_code, 130) << text_in(path("once.log"));
  EXPECT_THAT(text_in(path("once.log")), HasSubstr("SIGINT: ended after the save of step"));
  EXPECT_TRUE(std::filesystem::exists(path("once/latest")));
  const std::string log = path("twice.log");
  const Outcome twice =
      stopped("twice", " --pause 60000",
              "until grep -qs \"received SIGINT\" " + log +
                  " || ! kill -0 $pid; do sleep 0.05; done; sleep 0.2; kill -INT $pid; ");
  EXPECT_EQ(twice.exit_code, 130) << text_in(log);
  EXPECT_THAT(text_in(log), Not(HasSubstr("ended after the save")));
  EXPECT_FALSE(std::filesystem::exists(path("twice/latest")));
}

TEST_F(TrainResnetTest, TrainsAlikeOnAnyNumberOfRanksWithASharedBatchNorm) {
  const auto loss = [&](const std::string& ranks) {
    const std::string output = run("--sync-batch-norm --steps 2 --ranks " + ranks).output;
    const size_t at = output.find("step [2/4] epoch [1/2] loss ");
    EXPECT_NE(at, std::string::npos) << output;
    return at == std::string::npos ? 0 : std::stod(output.substr(at + 28));
  };
  const double alone = loss("1");
  EXPECT_GT(alone, 0);
  EXPECT_NEAR(loss("2"), alone, 1e-4);
  EXPECT_NEAR(loss("4"), alone, 1e-4);
}

TEST_F(TrainResnetTest, AddsItsRunToTheTable) {
  const std::string table = " --steps 1 --table " + path("runs.jsonl");
  EXPECT_THAT(run("--ranks 1" + table).output, HasSubstr("1 process "));
  const Outcome second = run("--ranks 2 --as-threads" + table);
  EXPECT_THAT(second.output, HasSubstr("1 process "));
  EXPECT_THAT(second.output, HasSubstr("2 threads "));
  std::ofstream(path("runs.jsonl"), std::ios::app) << "{}\n";
  EXPECT_THAT(run("--ranks 1" + table).output, HasSubstr("line 3: is no run of train_resnet"));
}

TEST_F(TrainResnetTest, WhatMakesNoSenseIsRefusedInWords) {
  EXPECT_THAT(run("--ranks 5").output,
              HasSubstr("--batch 12 cannot be shared by 5 ranks; give a multiple of 5"));
  EXPECT_THAT(run("--as-threads", std::string(ZP) + " run -n 2 -- ").output,
              HasSubstr("--as-threads: a launcher has started"));
  EXPECT_EQ(run("--stage 4").exit_code, 2);
  EXPECT_THAT(run("--auto-resume").output, HasSubstr("--auto-resume requires --save"));
  write("t10k", kTest + 4, 10);
  EXPECT_THAT(run("").output, HasSubstr("sample 10 has label 10; expected 0 to 9"));
  std::filesystem::remove(path("train-images-idx3-ubyte.gz"));
  EXPECT_THAT(run("").output,
              HasSubstr("train-images-idx3-ubyte.gz: there is no such file; scripts/get_data.sh"));
}

}  // namespace
}  // namespace zeropage::train_resnet_test
