// train_gpt that computes activations again instead of keeping them, and with dropout.
#include <cmath>
#include <filesystem>

#include "tests/examples/train_gpt_run.h"

namespace checkpointing_flags_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

class CheckpointingFlagsTest : public TrainGptTest {};

TEST_F(CheckpointingFlagsTest, ChangeNoBitWhateverIsRepeated) {
  for (const int ranks : {1, 2}) {
    std::string first;
    for (const int stage : {0, 3}) {
      const std::string at = "--layers 6 --dropout 0.1 --page-bytes 16KiB --ranks " +
                             std::to_string(ranks) + " --stage " + std::to_string(stage);
      for (const std::string policy : {"none", "blocks", "every:3", "every:sqrt"}) {
        const auto run = this->run(at + " --checkpoint-activations " + policy);
        if (first.empty()) first = run["weights_sha256"];
        EXPECT_EQ(run["weights_sha256"], first) << policy << ", " << at;
        const auto& activations = run["activations"];
        EXPECT_EQ(activations["policy"], policy);
        // Regions of 3 steps; the last region is not repeated, so it is not counted.
        const int64_t regions = policy == "none"      ? 0
                                : policy == "blocks"  ? 5
                                : policy == "every:3" ? 1
                                                      : 2;
        EXPECT_EQ(activations["forwards"], 3 * regions) << policy;
        EXPECT_EQ(activations["replays"], 3 * regions) << policy;
        EXPECT_LE(activations["recomputed_flops"], activations["forward_flops"]);
        EXPECT_EQ(activations["recomputed_flops"] > 0, regions > 0) << policy;
      }
    }
  }
}

TEST_F(CheckpointingFlagsTest, ChangeNoBitWhateverOperatorsAreRepeatedOrOffloaded) {
  const std::string model = "--layers 6 --d-model 64 --sequence 64 --batch 4 --dropout 0.1 ";
  const std::string disk = std::filesystem::current_path();  // the build's: /tmp may be in memory
  for (const int ranks : {1, 2}) {
    const std::string of_ranks = model + "--page-bytes 64KiB --ranks " + std::to_string(ranks);
    const auto plain = run(of_ranks + " --stage 0");
    const auto all = plain["activations"]["peak_bytes"].get<int64_t>();
    const auto budget = std::to_string(all * 6 / 10);
    for (const std::string& policy : std::vector<std::string>{
             "--checkpoint-activations selective", "--offload-activations host",
             "--offload-activations nvme:" + disk,
             "--checkpoint-activations blocks --offload-activations host",
             "--checkpoint-activations selective --offload-activations host", "budget"}) {
      const bool budgeted = policy == "budget";
      const auto run = this->run(of_ranks + " --stage 3 " +
                                 (budgeted ? "--checkpoint-activations budget:" + budget : policy));
      EXPECT_EQ(run["weights_sha256"], plain["weights_sha256"]) << policy << ", " << ranks;
      const auto& activations = run["activations"];
      const auto peak = activations["peak_bytes"].get<double>();
      EXPECT_LT(peak, 0.9 * static_cast<double>(all)) << policy;
      EXPECT_EQ(activations["offloaded_bytes"] > 0, policy.find("offload") != std::string::npos);
      for (const auto& entry : std::filesystem::directory_iterator(disk)) {
        EXPECT_THAT(entry.path().filename(),
                    ::testing::Not(::testing::StartsWith("rank-0.activations")));
      }
      if (!budgeted) continue;
      EXPECT_LE(peak, 1.02 * 0.6 * static_cast<double>(all));
      EXPECT_GT(activations["predicted_peak_bytes"], 0);
    }
  }
}

TEST_F(CheckpointingFlagsTest, OffloadKeepsWhatIsResidentIndependentOfDepth) {
  const auto peak = [&](int layers) {
    const auto run = this->run("--d-model 64 --sequence 64 --batch 4 --steps 2 --layers " +
                               std::to_string(layers) + " --offload-activations host");
    return run["activations"]["peak_bytes"].get<double>();
  };
  const double ratio = peak(64) / peak(8);
  RecordProperty("ratio_of_64_to_8_layers", std::to_string(ratio));
  EXPECT_LT(ratio, 1.05);
}

TEST_F(CheckpointingFlagsTest, ABudgetThatNoPlanReachesIsRefusedWithTheFigure) {
  const Outcome outcome = train_gpt(
      tiny("--layers 4 --d-model 64 --sequence 64 --checkpoint-activations budget:64KiB"));
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("raise the budget to that least peak"));
}

TEST_F(CheckpointingFlagsTest, DropoutDiffersByRankAndSeedAndIsNotDrawnAtZero) {
  const std::string plain = run("")["weights_sha256"];
  EXPECT_EQ(run("--dropout 0")["weights_sha256"], plain);
  const std::string dropped = run("--dropout 0.1")["weights_sha256"];
  EXPECT_NE(dropped, plain);
  EXPECT_EQ(run("--dropout 0.1")["weights_sha256"], dropped);
  EXPECT_EQ(run("--dropout 0.1 --checkpoint-activations blocks --accumulate 2")["weights_sha256"],
            run("--dropout 0.1 --accumulate 2")["weights_sha256"]);
}

TEST_F(CheckpointingFlagsTest, KeepTheInputsOfRegionsAndOneRegion) {
  for (const int layers : {4, 16, 36}) {
    const std::string model =
        "--d-model 64 --sequence 64 --steps 2 --layers " + std::to_string(layers);
    const auto peak = [&](const std::string& policy) {
      const auto run = this->run(model + " --checkpoint-activations " + policy);
      EXPECT_LE(run["activations"]["recomputed_flops"], run["activations"]["forward_flops"]);
      EXPECT_EQ(run["activations"]["peak_bytes_by_rank"][0], run["activations"]["peak_bytes"]);
      return run["activations"]["peak_bytes"].get<double>();
    };
    const double ratio = peak("every:sqrt") / peak("none");
    RecordProperty("ratio_of_" + std::to_string(layers) + "_layers", std::to_string(ratio));
    EXPECT_LT(ratio, (2 * std::sqrt(layers) + 2) / layers);
  }
}

TEST_F(CheckpointingFlagsTest, SayWhatWasRepeated) {
  const Outcome outcome = train_gpt(tiny("--layers 4 --ranks 2 --checkpoint-activations blocks"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("activations at their peak "));
  EXPECT_THAT(outcome.output, HasSubstr(" % of their regions' FLOPs in "));
  const auto run = json();
  const auto& activations = run["activations"];
  EXPECT_EQ(activations["peak_bytes_by_rank"].size(), 2U);
  EXPECT_EQ(activations["offloaded_bytes"], 0);
  EXPECT_TRUE(activations["predicted_peak_bytes"].is_null());
  EXPECT_GT(activations["recompute_seconds"], 0.0);
  EXPECT_EQ(run["flags"]["checkpoint-activations"], "blocks");
  EXPECT_GT(run["memory"][0]["at_peak"]["activation"], 0);
  EXPECT_THAT(train_gpt(tiny("")).output, ::testing::Not(HasSubstr("activations at their peak")));
}

// But for the segments of a transport that is there, which are staging.
double bytes_at_peak(const nlohmann::json& run) {
  const auto& memory = run["memory"][0];
  return memory["peak_bytes"].get<double>() - memory["at_peak"]["staging"].get<double>();
}

// Pages are gathered again for repetitions; the simulated run knows.
TEST_F(CheckpointingFlagsTest, HoldAndSendWhatASimulatedRunDoes) {
  for (const std::string policy : {"blocks", "every:sqrt", "selective"}) {
    const std::string flags =
        "--layers 6 --stage 3 --page-bytes 16KiB --ranks 3 --checkpoint-activations " + policy;
    const auto real = run(flags);
    const auto simulated = run(flags + " --communicator simulated");
    EXPECT_EQ(real["wire_bytes"], simulated["wire_bytes"]) << policy;
    EXPECT_NEAR(bytes_at_peak(simulated), bytes_at_peak(real), 0.03 * bytes_at_peak(real))
        << policy;
  }
}

class TiledMlpTest : public TrainGptTest {
 protected:
  // 16 samples are two tiles.
  nlohmann::json run(const std::string& flags, const std::string& tiled = "--tiled-mlp ") const {
    return TrainGptTest::run("--heads 4 --sequence 64 --clip-norm 1 " + tiled + flags);
  }
};

TEST_F(TiledMlpTest, HasTheSameLossesAndNormsOnEveryMesh) {
  const std::string in_double = "--compute-dtype fp64 ";
  const auto whole = run(in_double + "--batch 32", /*tiled=*/"");
  EXPECT_EQ(whole["flags"]["tiled-mlp"], false);
  for (const char* mesh :
       {"--ranks 1 --batch 32 --stage 0", "--ranks 2 --batch 16 --stage 2",
        "--ranks 1 --batch 16 --accumulate 2 --stage 1",
        "--ranks 2 --tensor 2 --batch 32 --stage 3", "--ranks 2 --context 2 --batch 32 --stage 3",
        "--ranks 2 --pipeline 2 --batch 16 --accumulate 2 --stage 3",
        "--ranks 2 --batch 16 --stage 3 --checkpoint-activations blocks",
        "--ranks 2 --batch 16 --stage 3 --checkpoint-activations selective",
        "--ranks 2 --batch 16 --stage 3 --offload-activations host"}) {
    SCOPED_TRACE(mesh);
    const auto tiled = run(in_double + mesh);
    EXPECT_EQ(tiled["flags"]["tiled-mlp"], true);
    EXPECT_GE(tiled["activations"]["replays"], 12) << "three steps of two blocks of two tiles";
    for (size_t step = 0; step < 3; ++step) {
      for (const char* of : {"loss", "gradient_norm"}) {
        EXPECT_NEAR(tiled[of][step].get<double>() / whole[of][step].get<double>(), 1, 1e-11) << of;
      }
    }
  }
}

// An MLP keeps its hidden activations before and behind GELU, each four times as wide as the model, in fp32.
TEST_F(TiledMlpTest, KeepsNoHiddenActivations) {
  constexpr int64_t kTokens = 1024, kWidth = 32, kMoreBlocks = 6;
  const auto peak_of = [&](const std::string& tiled, int64_t layers) {
    const auto run = this->run("--batch 16 --steps 1 --layers " + std::to_string(layers), tiled);
    EXPECT_EQ(run["activations"]["replays"], tiled.empty() ? 0 : 2 * layers);
    return run["activations"]["peak_bytes"].get<int64_t>();
  };
  const auto of_more_blocks = [&](const std::string& tiled) {
    return peak_of(tiled, 2 + kMoreBlocks) - peak_of(tiled, 2);
  };
  const int64_t less = of_more_blocks("") - of_more_blocks("--tiled-mlp ");
  EXPECT_NEAR(static_cast<double>(less), kMoreBlocks * 2 * kTokens * 4 * kWidth * 4,
              0.02 * static_cast<double>(less));
}

TEST_F(TiledMlpTest, HoldsAndSendsWhatASimulatedRunDoes) {
  for (const char* mesh : {"--ranks 3 --stage 3 --page-bytes 16KiB",
                           "--ranks 2 --tensor 2 --stage 1", "--ranks 2 --context 2 --stage 3",
                           "--ranks 2 --pipeline 2 --accumulate 2 --untied-head --stage 1"}) {
    SCOPED_TRACE(mesh);
    const std::string flags = std::string("--batch 16 ") + mesh;
    const auto real = run(flags);
    const auto simulated = run(flags + " --communicator simulated");
    EXPECT_EQ(real["wire_bytes"], simulated["wire_bytes"]);
    EXPECT_NEAR(bytes_at_peak(simulated), bytes_at_peak(real), 0.03 * bytes_at_peak(real));
    EXPECT_LT(bytes_at_peak(simulated),
              bytes_at_peak(run(flags + " --communicator simulated", /*tiled=*/"")));
  }
}

TEST_F(TiledMlpTest, IsPlannedBelowALimit) {
  const std::string flags = "--batch 16 --stage 0 --checkpoint-activations none ";
  const auto tiled = run(flags + "--device-memory 1GiB"),
             whole = run(flags + "--device-memory 1GiB", "");
  EXPECT_NE(tiled["fits"], whole["fits"]) << tiled["fits"];
}

TEST_F(TiledMlpTest, IsRefusedWhereTokensAreNotAlone) {
  expect_refused(train_gpt("--tiled-mlp --experts 4"),
                 "a loss of balance is of all tokens at once; leave --tiled-mlp out");
  expect_refused(
      train_gpt("--tiled-mlp --ranks 2 --pipeline 2 --accumulate 2 --schedule zero-bubble"),
      "zero-bubble would repeat what --tiled-mlp drops");
}

TEST_F(CheckpointingFlagsTest, AreRefusedInWords) {
  const auto refused = [](const std::string& value, const std::string& words) {
    expect_refused(train_gpt("--layers 6 --checkpoint-activations " + value), words);
  };
  refused("all", "expected none, blocks, every:K, every:sqrt, selective or budget:BYTES");
  refused("every:0", "expected how many blocks are one region, 1 or more");
  refused("every:3x", "expected how many blocks are one region, 1 or more");
  refused("every:7", "expected at most the model's 6 layers a region");
  refused("budget:much", "expected a size such as 4096");
  refused("budget:0", "expected 1 byte or more");
  refused("budget:1MiB --communicator simulated", "computes no values to measure or offload");
  expect_refused(train_gpt("--offload-activations disk"), "expected none, host or nvme:DIR");
  expect_refused(train_gpt("--offload-activations nvme:"), "expected none, host or nvme:DIR");
  for (const std::string folder : {"/none", "/dev/shm"}) {
    const Outcome outcome = train_gpt(tiny("--offload-activations nvme:" + folder));
    EXPECT_NE(outcome.exit_code, 0);
    EXPECT_THAT(outcome.output, HasSubstr(folder == "/none" ? "No such file or directory"
                                                            : "is on tmpfs, which is host memory"));
  }
  expect_refused(train_gpt("--dropout 1"), "expected a probability from 0 to below 1");
  expect_refused(train_gpt("--dropout nan"), "expected a probability from 0 to below 1");
  expect_refused(train_gpt("--dropout 0.1 --world-invariant"), "each rank draws its own masks");
  expect_refused(train_gpt("--dropout 0.1 --communicator simulated"), "computes no values");
}

}  // namespace
}  // namespace checkpointing_flags_test
