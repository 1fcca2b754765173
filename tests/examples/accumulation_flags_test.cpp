// train_gpt with micro-batches, in low precision and clipped.
#include "tests/examples/train_gpt_run.h"

namespace accumulation_flags_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

class AccumulationFlagsTest : public TrainGptTest {};

void expect_near(const nlohmann::json& expected, const nlohmann::json& actual, double relative) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t step = 0; step < expected.size(); ++step) {
    const double value = expected[step];
    EXPECT_NEAR(actual[step].get<double>(), value, relative * value) << "step " << step + 1;
  }
}

TEST_F(AccumulationFlagsTest, HaveTheLossAndNormOfOneBatchAtEveryStage) {
  const auto whole = run("--ranks 2 --batch 8");
  for (const int stage : {0, 1, 2, 3}) {
    const std::string at = "--ranks 2 --stage " + std::to_string(stage);
    for (const std::string split : {" --batch 1 --accumulate 8", " --batch 4 --accumulate 2",
                                    " --batch 2 --accumulate 4 --reduce-micro-steps once"}) {
      const auto parts = run(at + split);
      // Later steps start from weights that were rounded otherwise.
      expect_near(whole["loss"], parts["loss"], 1e-6);
      expect_near(whole["gradient_norm"], parts["gradient_norm"], 1e-6);
    }
  }
}

TEST_F(AccumulationFlagsTest, GiveTheSameBitsAtEveryStageWhereTheyNameTheOrderOfSums) {
  const std::string each = "--reduce-micro-steps each ", once = "--reduce-micro-steps once ";
  for (const std::string& flags :
       {each + "--accumulate 2", each + "--accumulate 8 --clip-norm 0.5", once + "--accumulate 3",
        each + "--accumulate 2 --compute-dtype bf16",
        once + "--accumulate 2 --compute-dtype fp16 --reduce-dtype fp32",
        each + "--accumulate 2 --compute-dtype bf16 --low-precision-update stochastic",
        each + "--accumulate 2 --compute-dtype bf16 --keep-fp32 *norm"}) {
    const auto first = run("--ranks 2 --page-bytes 16KiB --stage 0 " + flags);
    for (const int stage : {1, 2, 3}) {
      const auto other =
          run("--ranks 2 --page-bytes 16KiB --stage " + std::to_string(stage) + " " + flags);
      EXPECT_EQ(other["weights_sha256"], first["weights_sha256"]) << flags << " stage " << stage;
      EXPECT_EQ(other["gradient_norm"], first["gradient_norm"]) << flags << " stage " << stage;
    }
  }
}

TEST_F(AccumulationFlagsTest, ReduceOnceAtStagesZeroAndOneByDefaultAndSaySo) {
  const auto hash = [&](int stage, const std::string& flags) {
    return run("--ranks 2 --accumulate 8 --stage " + std::to_string(stage) +
               flags)["weights_sha256"];
  };
  for (const int stage : {0, 1, 2, 3}) {
    const std::string policy = stage < 2 ? "once" : "each";
    EXPECT_EQ(hash(stage, ""), hash(stage, " --reduce-micro-steps " + policy)) << stage;
  }
  EXPECT_THAT(train_gpt(tiny("--ranks 2 --accumulate 8")).output,
              HasSubstr("gradients of 8 micro-steps are reduced once a step: each rank has whole "
                        "gradients at this stage"));
  EXPECT_THAT(train_gpt(tiny("--ranks 2 --accumulate 8 --stage 2")).output,
              HasSubstr("gradients of 8 micro-steps are reduced at each micro-step: gradients are "
                        "sharded at this stage"));
}

TEST_F(AccumulationFlagsTest, WorldInvariantRunsHaveTheSameBitsForEverySplit) {
  for (const std::string flags : {"", " --clip-norm 0.5 --compute-dtype bf16"}) {
    const auto first = run("--world-invariant --ranks 1 --accumulate 8 --stage 0" + flags);
    for (const std::string split :
         {"--ranks 2 --accumulate 4 --stage 3", "--ranks 4 --accumulate 2 --stage 0",
          "--ranks 8 --accumulate 1 --stage 3"}) {
      const auto other = run("--world-invariant " + split + flags);
      EXPECT_EQ(other["weights_sha256"], first["weights_sha256"]) << split << flags;
      EXPECT_EQ(other["gradient_norm"], first["gradient_norm"]) << split << flags;
    }
  }
}

TEST_F(AccumulationFlagsTest, SendGradientsOnceOrAtEachMicroStep) {
  const auto sent = [](const nlohmann::json& run) {
    return run["wire_bytes"][1]["reduce_scatter"].get<int64_t>();
  };
  const std::string two = "--ranks 2 --stage 2 ";
  const int64_t one = sent(run(two));
  EXPECT_EQ(sent(run(two + "--accumulate 8")), 8 * one);
  EXPECT_EQ(sent(run(two + "--accumulate 8 --reduce-micro-steps once")), one);
  EXPECT_EQ(sent(run(two + "--accumulate 8 --gradient-budget 1GiB")), one);
  EXPECT_EQ(sent(run(two + "--accumulate 8 --gradient-budget 1KiB")), 8 * one);
}

TEST_F(AccumulationFlagsTest, SkipAStepOnAllRanksWhereOneGradientOfOneRankIsInfinite) {
  for (const int stage : {0, 3}) {
    const std::string flags =
        "--ranks 2 --layers 4 --accumulate 3 --compute-dtype fp16 --loss-scale auto --stage " +
        std::to_string(stage);
    // The weights before the step that is skipped, and after it.
    const auto before = run(flags + " --steps 2");
    const auto after = run(flags + " --steps 3 --inject-inf 1,3,2,2");
    EXPECT_EQ(after["weights_sha256"], before["weights_sha256"]);
    ASSERT_EQ(after["skipped_steps"].size(), before["skipped_steps"].size() + 1);
    EXPECT_EQ(after["skipped_steps"].back()["step"], 3);
    EXPECT_THAT(after["skipped_steps"].back()["reason"].get<std::string>(),
                HasSubstr("\"blocks.3.attention_qkv.weight\""));
    const auto longer = run(flags + " --steps 4 --inject-inf 1,3,2,2");
    EXPECT_EQ(longer["loss_scale"][3].get<double>(), longer["loss_scale"][2].get<double>() / 2);
  }
}

TEST_F(AccumulationFlagsTest, SolveTheGlobalBatch) {
  EXPECT_EQ(run("--ranks 2 --batch 2 --global-batch 16")["flags"]["accumulate"], 4);
  EXPECT_EQ(run("--ranks 2 --accumulate 4 --global-batch 16")["flags"]["batch"], 2);
  expect_refused(train_gpt("--ranks 2 --batch 2 --global-batch 10"), "--global-batch");
}

TEST_F(AccumulationFlagsTest, ThatContradictEachOtherAreRefused) {
  expect_refused(train_gpt("--accumulate 0"), "--accumulate");
  expect_refused(train_gpt("--clip-norm nan"), "--clip-norm nan: expected a finite number");
  expect_refused(train_gpt("--loss-scale 3"), "expected auto or a power of two");
  expect_refused(train_gpt("--world-invariant --reduce-micro-steps once"),
                 "adds up the ranks at each micro-step");
  expect_refused(train_gpt("--world-invariant --compute-dtype bf16 --reduce-dtype compute"),
                 "leave --reduce-dtype out");
  expect_refused(train_gpt("--low-precision-update nearest"), "use --compute-dtype bf16 or fp16");
  expect_refused(train_gpt("--compute-dtype fp16 --low-precision-update stochastic"),
                 "is for bf16");
  expect_refused(train_gpt("--stage 2 --reshard step"), "only stage 3 shards parameters");
  expect_refused(train_gpt("--inject-inf 0,9,0"), "no such layer");
  const Outcome three = train_gpt(tiny("--world-invariant --ranks 3"));
  EXPECT_NE(three.exit_code, 0);
  EXPECT_THAT(three.output, HasSubstr("expected a power of two of ranks, got 3"));
}

}  // namespace
}  // namespace accumulation_flags_test
