// --pipeline and --schedule: every mesh of {pipeline, data, tensor} trains to one rank's bits, or losses and norms.
#include "tests/examples/train_gpt_run.h"

namespace pipeline_flags_test {
namespace {

using namespace zeropage::testing;

class PipelineFlagsTest : public TrainGptTest {
 protected:
  // Four micro-batches of one sample.
  nlohmann::json run(const std::string& flags) const {
    return TrainGptTest::run("--layers 4 --batch 1 --accumulate 4 " + flags);
  }
};

TEST_F(PipelineFlagsTest, HasTheBitsOfAsManyMicroBatchesWithoutAPipeline) {
  // Stages of ZeRO have orders of sums of their own by default.
  const std::string common = "--untied-head --clip-norm 1 --reduce-micro-steps each ";
  const auto whole = run(common + "--ranks 2 --stage 1");
  const auto expect_bits = [&](const std::string& flags) {
    SCOPED_TRACE(flags);
    const auto cut = run(common + flags);
    for (const char* key : {"weights_sha256", "loss", "gradient_norm", "parameters"}) {
      EXPECT_EQ(cut[key], whole[key]) << key;
    }
    EXPECT_NEAR(cut["held_out_loss"].get<double>() / whole["held_out_loss"].get<double>(), 1,
                1e-12);
  };
  expect_bits("--ranks 4 --pipeline 2 --stage 0 --schedule gpipe");
  expect_bits("--ranks 4 --pipeline 2 --stage 3 --checkpoint-activations blocks");
  expect_bits("--ranks 4 --pipeline 2 --stage 3 --reshard step --schedule interleaved");
  expect_bits("--ranks 8 --pipeline 4 --stage 2 --checkpoint-activations selective");
  expect_bits("--ranks 4 --pipeline 2 --stage 3 --schedule zero-bubble");
  expect_bits("--ranks 8 --pipeline 4 --stage 1 --schedule zero-bubble --offload-activations host");
}

TEST_F(PipelineFlagsTest, HasTheBitsWithoutAPipelineWhereDataIsShardedByGroups) {
  for (const char* groups : {"--secondary-shard-within 2", "--shard-within 2"}) {
    SCOPED_TRACE(groups);
    const std::string flags = std::string("--untied-head --clip-norm 1 --stage 3 ") + groups;
    const auto whole = run(flags + " --ranks 4");
    const auto cut = run(flags + " --ranks 8 --pipeline 2 --schedule zero-bubble");
    for (const char* key : {"weights_sha256", "loss", "gradient_norm"}) {
      EXPECT_EQ(cut[key], whole[key]) << key;
    }
  }
}

TEST_F(PipelineFlagsTest, EveryMeshHasOneRanksLossesAndNorms) {
  const std::string in_double = "--compute-dtype fp64 --steps 4 --clip-norm 1 --heads 4 ";
  const auto one = run(in_double + "--batch 2");
  for (const char* mesh :
       {"--ranks 2 --pipeline 2 --stage 3 --batch 2", "--ranks 4 --pipeline 2 --tensor 2 --batch 2",
        "--ranks 8 --pipeline 2 --tensor 2 --stage 3 --schedule interleaved",
        "--ranks 4 --pipeline 4 --schedule gpipe --stage 0 --batch 2",
        "--ranks 4 --pipeline 2 --tensor 2 --schedule zero-bubble --stage 2 --batch 2"}) {
    SCOPED_TRACE(mesh);
    const auto other = run(in_double + mesh);
    for (const char* key : {"loss", "gradient_norm"}) {
      for (size_t step = 0; step < one[key].size(); ++step) {
        EXPECT_NEAR(other[key][step].get<double>() / one[key][step].get<double>(), 1, 1e-12)
            << key << ", step " << step;
      }
    }
    EXPECT_EQ(other["parameters"], one["parameters"]);
  }
}

TEST_F(PipelineFlagsTest, ARankHoldsTheFormulasShardOfItsStageAndSendsWhatPassesItsBoundaries) {
  constexpr int64_t kSteps = 3, kMicroBatches = 4, kTokens = 32, kWidth = 32, kHeader = 88;
  const auto real = run("--untied-head --ranks 4 --pipeline 2 --stage 3");
  const int64_t activation = kTokens * kWidth * 4;
  const auto sent = [](const nlohmann::json& of_run, size_t rank) {
    return of_run["wire_bytes_by_axis"][rank]["pipeline"]["send"].get<int64_t>();
  };
  // Two stages of two ranks each: activations and their shape, and gradients.
  EXPECT_EQ(sent(real, 0), kSteps * (kMicroBatches * activation + kHeader));
  EXPECT_EQ(sent(real, 2), kSteps * kMicroBatches * activation);
  const auto simulated =
      run("--untied-head --ranks 4 --pipeline 2 --stage 3 --communicator simulated");
  EXPECT_NEAR(simulated["bubble"].get<double>(), 0.2, 1e-9);
  for (const size_t rank : {0, 1, 2, 3}) {
    const auto& held = real["memory"][rank];
    EXPECT_EQ(simulated["memory"][rank]["formula_bytes"], held["formula_bytes"]);
    EXPECT_NEAR(simulated["memory"][rank]["persistent_bytes"].get<double>(),
                held["persistent_bytes"].get<double>(), 128);
    EXPECT_EQ(sent(simulated, rank), sent(real, rank)) << rank;
  }
  // Where each gradient takes as long as a forward, a rank waits for one of 13 seconds.
  const auto split =
      run("--untied-head --ranks 4 --pipeline 2 --stage 3 --schedule zero-bubble --communicator "
          "simulated");
  EXPECT_NEAR(split["bubble"].get<double>(), 1.0 / 13, 1e-9);
  EXPECT_EQ(sent(split, 2), sent(real, 2));
  const auto large = run("--d-model 256 --sequence 16 --steps 1 --ranks 4 --pipeline 2 --stage 3");
  for (const auto& of_rank : large["memory"]) {
    EXPECT_NEAR(of_rank["persistent_bytes"].get<double>() / of_rank["formula_bytes"].get<double>(),
                1, 0.005);
  }
}

TEST_F(PipelineFlagsTest, AStateGoesOnOverTheSameMeshAndOverOthers) {
  const std::string flags = "--untied-head --steps 4 --ranks 4 --stage 3 ";
  const auto whole = run(flags + "--pipeline 2");
  run(flags + "--pipeline 2 --steps 2 --save " + path("run"));
  EXPECT_EQ(run(flags + "--pipeline 2 --resume " + path("run"))["weights_sha256"],
            whole["weights_sha256"]);
  const auto other =
      run("--untied-head --steps 4 --ranks 2 --reduce-micro-steps each --resume " + path("run"));
  EXPECT_EQ(other["weights_sha256"], whole["weights_sha256"]);
}

TEST_F(PipelineFlagsTest, WritesWhatItsRanksDidForZpSchedule) {
  // Forwards and backwards of four micro-batches, and both halves of a backward.
  for (const auto& [schedule, actions] : {std::pair("1f1b", 8U), std::pair("zero-bubble", 12U)}) {
    run(std::string("--ranks 2 --pipeline 2 --schedule ") + schedule + " --timeline " +
        path("times.json"));
    const auto times = nlohmann::json::parse(std::ifstream(path("times.json")));
    EXPECT_EQ(times["schedule"], schedule);
    ASSERT_EQ(times["ranks"].size(), 2U);
    for (const auto& of_rank : times["ranks"]) EXPECT_EQ(of_rank.size(), actions);
  }
}

TEST_F(PipelineFlagsTest, RefusesWhatAPipelineDoesNotDo) {
  const auto refused = [&](const std::string& flags, const char* words) {
    SCOPED_TRACE(flags);
    expect_refused(train_gpt(flags), words);
  };
  const std::string two = "--ranks 2 --pipeline 2 --accumulate 4 ";
  refused("--ranks 3 --pipeline 2 --accumulate 2", "does not divide the 3 ranks");
  refused("--ranks 2 --pipeline 2 --accumulate 1", "micro-batches are those of --accumulate");
  refused(two + "--layers 1", "expected at least a block for each of 2 stages");
  refused("--schedule gpipe", "--schedule: is about a pipeline");
  refused(two + "--chunks 3", "--chunks: only the schedule interleaved");
  refused(two + "--schedule zero-bubble --checkpoint-activations blocks",
          "zero-bubble would repeat what --checkpoint-activations drops");
  refused(two + "--sample 10", "leave --sample out");
  refused(two + "--inject-inf 0,0,0", "leave it out");
  refused(two + "--deferred on", "leave --deferred out");
  refused(two + "--checkpoint-activations budget:1MiB", "sees one micro-batch at a time");
  refused(two + "--offload-optimizer host --offload-step backward", "use --offload-step step");
  refused(two + "--schedule interleaved --world-invariant", "--world-invariant; leave it out");
}

}  // namespace
}  // namespace pipeline_flags_test
