// --experts, --active and --expert-parallel: experts over ranks train to one rank's losses and norms, and simulated runs of them
// send and hold what real ones do.
#include "tests/examples/train_gpt_run.h"

namespace expert_flags_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 3;

class ExpertFlagsTest : public TrainGptTest {
 protected:
  nlohmann::json run(const std::string& flags) const {
    return TrainGptTest::run("--heads 4 --experts 4 --active 2 " + flags);
  }
};

// Relative.
void expect_close(const nlohmann::json& got, const nlohmann::json& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t step = 0; step < got.size(); ++step) {
    EXPECT_NEAR(got[step].get<double>() / expected[step].get<double>(), 1, tolerance)
        << "step " << step;
  }
}

int64_t sent(const nlohmann::json& of_run, size_t rank, const char* axis, const char* operation) {
  return of_run["wire_bytes_by_axis"][rank][axis][operation].get<int64_t>();
}

// The loss of balance is of a rank's own tokens, so without it any number of ranks has the same losses.
TEST_F(ExpertFlagsTest, ExpertsOverRanksHaveOneRanksLossesAndNorms) {
  const std::string fixed = "--clip-norm 1 --compute-dtype fp64 --balance-loss 0 ";
  const auto one = run(fixed + "--batch 4");
  EXPECT_TRUE(one["experts"]["travel"].is_null());
  for (const char* spread :
       {"--ranks 2 --batch 2 --expert-parallel 2 --stage 3",
        "--ranks 2 --batch 2 --expert-parallel 2 --stage 0",
        "--ranks 4 --batch 1 --expert-parallel 2 --stage 1",
        "--ranks 4 --batch 1 --expert-parallel 4 --stage 2",
        "--ranks 4 --batch 1 --expert-parallel 2 --stage 3 --deferred off",
        "--ranks 4 --batch 2 --expert-parallel 2 --context 2 --stage 3",
        "--ranks 2 --batch 1 --accumulate 2 --expert-parallel 2 --stage 2",
        "--ranks 2 --batch 2 --expert-parallel 2 --checkpoint-activations blocks"}) {
    SCOPED_TRACE(spread);
    const auto other = run(fixed + spread);
    expect_close(other["loss"], one["loss"], 1e-11);
    expect_close(other["gradient_norm"], one["gradient_norm"], 1e-11);
    EXPECT_NEAR(other["held_out_loss"].get<double>() / one["held_out_loss"].get<double>(), 1,
                1e-11);
    EXPECT_EQ(other["parameters"], one["parameters"]);
    EXPECT_EQ(other["experts"]["travel"], "tokens");
    EXPECT_EQ(other["experts"]["load_imbalance"], one["experts"]["load_imbalance"]);
    EXPECT_GT(sent(other, 0, "expert", "send"), 0);
  }
}

// With the loss of balance, and in any precision: what travels changes nothing.
TEST_F(ExpertFlagsTest, SpreadingExpertsChangesNothingAtTheSameNumberOfRanks) {
  for (const char* fixed :
       {"--ranks 4 --batch 1 --stage 1 ", "--ranks 4 --batch 1 --stage 3 --compute-dtype bf16 "}) {
    SCOPED_TRACE(fixed);
    const auto whole = run(fixed);
    for (const char* spread : {"--expert-parallel 2", "--expert-parallel 4"}) {
      const auto other = run(fixed + std::string(spread));
      expect_close(other["loss"], whole["loss"], 1e-4);
      // Sums of bf16 gradients have other orders.
      expect_close(other["gradient_norm"], whole["gradient_norm"], 1e-2);
    }
    const auto without = run(fixed + std::string("--balance-loss 0"));
    EXPECT_GT(whole["loss"][0].get<double>(), without["loss"][0].get<double>() + 0.01)
        << "the loss has that of balance in it";
  }
}

// Both matrices of an expert are as wide as the MLP's part that a token takes.
TEST_F(ExpertFlagsTest, ATokenMeetsAsManyWeightsAsInTheDenseModel) {
  constexpr int64_t kWidth = 32, kLayers = 2, kExperts = 4, kActive = 2;
  const auto dense = TrainGptTest::run("--steps 1");
  const auto of_experts = run("--steps 1");
  const int64_t biases = kLayers * 5 * kWidth, routers = kLayers * kExperts * kWidth;
  EXPECT_EQ(of_experts["experts"]["hidden"], 4 * kWidth / kActive);
  EXPECT_EQ(of_experts["experts"]["active_parameters"].get<int64_t>() + biases - routers,
            dense["parameters"].get<int64_t>());
  EXPECT_EQ(of_experts["parameters"].get<int64_t>() + biases - routers,
            dense["parameters"].get<int64_t>() + kLayers * 8 * kWidth * kWidth);
  EXPECT_FALSE(dense.contains("experts"));
}

TEST_F(ExpertFlagsTest, ARankHoldsTheFormulasShardOfItsExperts) {
  const auto formula_of = [&](const std::string& mesh) {
    SCOPED_TRACE(mesh);
    const auto of_run = run("--d-model 128 --sequence 16 --batch 1 --steps 1 " + mesh);
    for (const auto& of_rank : of_run["memory"]) {
      EXPECT_NEAR(
          of_rank["persistent_bytes"].get<double>() / of_rank["formula_bytes"].get<double>(), 1,
          0.005);
    }
    return of_run["memory"][0]["formula_bytes"].get<double>();
  };
  // At stage 3 a rank has as much of everything with and without; at stage 0 half of the experts.
  const double whole = formula_of("--ranks 4 --stage 3");
  EXPECT_EQ(formula_of("--ranks 4 --expert-parallel 2 --stage 3"), whole);
  EXPECT_EQ(formula_of("--ranks 4 --expert-parallel 4 --stage 3"), whole);
  EXPECT_LT(formula_of("--ranks 2 --expert-parallel 2 --stage 0"),
            0.7 * formula_of("--ranks 2 --stage 0"));
  EXPECT_LT(formula_of("--ranks 4 --expert-parallel 2 --stage 2 --compute-dtype bf16"),
            formula_of("--ranks 4 --stage 2 --compute-dtype bf16"));
}

// Where all tokens take all experts they are spread evenly, as in a simulated world.
TEST_F(ExpertFlagsTest, ASimulatedRunSendsAndHoldsWhatARealOneDoes) {
  for (const char* mesh :
       {"--ranks 2 --expert-parallel 2 --stage 0", "--ranks 4 --expert-parallel 2 --stage 1",
        "--ranks 4 --expert-parallel 4 --stage 2", "--ranks 4 --expert-parallel 2 --stage 3",
        "--ranks 4 --expert-parallel 2 --context 2 --stage 3",
        "--ranks 2 --expert-parallel 2 --stage 3 --checkpoint-activations every:1",
        "--ranks 2 --stage 3"}) {
    SCOPED_TRACE(mesh);
    const std::string flags = std::string("--active 4 ") + mesh;
    const auto real = run(flags);
    const auto simulated = run(flags + " --communicator simulated");
    for (size_t rank = 0; rank < real["memory"].size(); ++rank) {
      for (const char* axis : {"expert", "data", "context"}) {
        EXPECT_EQ(simulated["wire_bytes_by_axis"][rank][axis],
                  real["wire_bytes_by_axis"][rank][axis])
            << axis << " of rank " << rank;
      }
      // In a real world ranks also tell each other that they are in the same step, in 48 bytes.
      for (const char* operation : {"all_gather", "reduce_scatter", "all_reduce"}) {
        EXPECT_NEAR(sent(simulated, rank, "same_experts", operation),
                    sent(real, rank, "same_experts", operation), kSteps * 48)
            << operation;
      }
      const auto& planned = simulated["memory"][rank];
      const auto& held = real["memory"][rank];
      EXPECT_EQ(planned["formula_bytes"], held["formula_bytes"]);
      EXPECT_NEAR(planned["persistent_bytes"].get<double>(), held["persistent_bytes"], 128);
      const auto peak = held["peak_bytes"].get<double>() - held["at_peak"]["staging"].get<double>();
      EXPECT_NEAR(planned["peak_bytes"].get<double>(), peak, 0.03 * peak);
    }
    EXPECT_EQ(simulated["experts"]["travel"], real["experts"]["travel"]);
  }
}

TEST_F(ExpertFlagsTest, TheReportSaysHowUnevenlyTokensWereRouted) {
  const auto uneven = run("--ranks 4 --batch 2 --expert-parallel 2");
  ASSERT_EQ(uneven["experts"]["load_imbalance"].size(), 2U);
  for (size_t layer = 0; layer < 2; ++layer) {
    const double expert = uneven["experts"]["load_imbalance"][layer];
    const double rank = uneven["experts"]["rank_load_imbalance"][layer];
    EXPECT_GT(rank, 1);
    EXPECT_GE(expert, rank);
    // The busiest of two ranks has the busiest expert, and less than all.
    EXPECT_LT(rank, 2);
  }
  const auto even = run("--active 4 --ranks 2 --expert-parallel 2");
  EXPECT_EQ(even["experts"]["load_imbalance"], nlohmann::json({1.0, 1.0}));
  EXPECT_EQ(even["experts"]["rank_load_imbalance"], nlohmann::json({1.0, 1.0}));
}

TEST_F(ExpertFlagsTest, AutoSendsWhatIsFewerBytes) {
  const auto few = run("--ranks 2 --expert-parallel 2 --batch 1 --expert-travel auto");
  EXPECT_EQ(few["experts"]["travel"], "tokens");
  EXPECT_LT(few["experts"]["tokens_bytes"], few["experts"]["weights_bytes"]);
  const std::string many = "--ranks 2 --batch 16 --expert-hidden 8 ";
  const auto whole = run(many + "--expert-parallel 2 --expert-travel auto");
  EXPECT_EQ(whole["experts"]["travel"], "weights");
  EXPECT_GT(whole["experts"]["tokens_bytes"], whole["experts"]["weights_bytes"]);
  EXPECT_EQ(sent(whole, 0, "expert", "send"), 0);
  const auto without = run(many);
  EXPECT_EQ(whole["loss"], without["loss"]);
  EXPECT_EQ(whole["memory"][0]["formula_bytes"], without["memory"][0]["formula_bytes"]);
}

TEST_F(ExpertFlagsTest, AStateGoesOnOverOtherRanks) {
  const std::string fixed = "--compute-dtype fp64 --balance-loss 0 ";
  const auto whole = run(fixed + "--batch 4 --steps 6");
  run(fixed + "--ranks 2 --batch 2 --expert-parallel 2 --stage 1 --save " + path("run"));
  for (const char* onto : {"--batch 4", "--ranks 2 --batch 2 --stage 3",
                           "--ranks 4 --batch 1 --expert-parallel 4 --stage 3",
                           "--ranks 2 --batch 2 --expert-parallel 2 --stage 2"}) {
    SCOPED_TRACE(onto);
    const auto resumed = run(fixed + "--steps 6 " + onto + " --resume " + path("run"));
    ASSERT_EQ(resumed["loss"].size(), 3U);
    for (size_t step = 0; step < 3; ++step) {
      EXPECT_NEAR(resumed["loss"][step].get<double>(), whole["loss"][step + 3].get<double>(),
                  1e-11);
    }
  }
}

// What the tokens beyond an even share would have had of an expert is missing.
TEST_F(ExpertFlagsTest, ACapacityDropsTokensWhereverExpertsAre) {
  const std::string fixed = "--ranks 2 --compute-dtype fp64 --steps 1 ";
  const auto all = run(fixed), dropped = run(fixed + "--capacity 1");
  EXPECT_NE(all["loss"][0], dropped["loss"][0]);
  const auto spread = run(fixed + "--capacity 1 --expert-parallel 2");
  expect_close(spread["loss"], dropped["loss"], 1e-12);
  EXPECT_LT(sent(spread, 0, "expert", "send"),
            sent(run(fixed + "--expert-parallel 2"), 0, "expert", "send"));
}

TEST_F(ExpertFlagsTest, WhatExpertsCannotDoIsRefused) {
  for (const char* flag : {"--active 2", "--expert-hidden 8", "--balance-loss 0.1", "--capacity 2",
                           "--expert-parallel 2", "--expert-travel auto"}) {
    expect_refused(train_gpt(flag), "is about experts; use --experts E");
  }
  const auto refused = [](const std::string& flags, const char* words) {
    expect_refused(train_gpt("--experts 6 --heads 4 " + flags), words);
  };
  refused("--active 7", "--active 7: a token takes at most all of --experts 6");
  refused("--active 3 --d-model 64", "does not divide the MLP's 256 features");
  refused("--balance-loss -1", "--balance-loss -1: expected a finite number >= 0");
  refused("--capacity inf", "--capacity inf: expected a finite number >= 0");
  refused("--ranks 2 --tensor 2", "--tensor cuts no experts");
  refused("--ranks 2 --pipeline 2 --accumulate 2", "leave --pipeline out");
  refused("--optimizer muon", "Muon has no group of stacked matrices here");
  refused("--expert-travel auto", "use --expert-parallel RANKS");
  refused("--ranks 4 --expert-parallel 4", "does not divide --experts 6");
  refused("--ranks 3 --expert-parallel 2", "does not divide the 3 ranks");
  refused("--ranks 2 --expert-parallel 2 --context 2",
          "--expert-parallel 2: with --context 2 does not divide the 2 ranks");
  const std::string spread = "--ranks 4 --expert-parallel 2 ";
  refused(spread + "--shard-within 2", "leave --shard-within out");
  refused(spread + "--stage 3 --secondary-shard-within 2", "leave --secondary-shard-within out");
  refused(spread + "--world-invariant", "leave --world-invariant out");
  refused(spread + "--optimizer lamb", "--optimizer lamb wants whole tensors");
  refused(spread + "--optimizer adafactor", "--optimizer adafactor wants whole tensors");
  refused(spread + "--checkpoint-activations budget:1MiB", "would each choose what to repeat");
  refused(spread + "--expert-travel auto --device-memory 1GiB",
          "leave --expert-travel auto out, or --device-memory and --host-memory");
}

}  // namespace
}  // namespace expert_flags_test
