// --tensor and --shard-within: every mesh trains to one rank's losses and norms.
#include "tests/examples/train_gpt_run.h"

namespace mesh_flags_test {
namespace {

using namespace zeropage::testing;

class MeshFlagsTest : public TrainGptTest {
 protected:
  nlohmann::json run(const std::string& flags) const {
    const Outcome outcome = train_gpt(tiny("--heads 4 " + flags));
    EXPECT_EQ(outcome.exit_code, 0) << flags << ":\n" << outcome.output;
    return json();
  }
};

void expect_close(const nlohmann::json& got, const nlohmann::json& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t step = 0; step < got.size(); ++step) {
    EXPECT_NEAR(got[step].get<double>() / expected[step].get<double>(), 1, tolerance) << step;
  }
}

TEST_F(MeshFlagsTest, EveryMeshHasOneRanksLossesAndNorms) {
  const auto one = run("--global-batch 8 --batch 8");
  for (const char* mesh : {"--ranks 2 --tensor 2", "--ranks 4 --tensor 2", "--ranks 4 --tensor 4",
                           "--ranks 4 --shard-within 2", "--ranks 8 --tensor 2 --shard-within 2"}) {
    for (const int stage : {1, 3}) {
      SCOPED_TRACE(std::string(mesh) + " --stage " + std::to_string(stage));
      const auto other =
          run(std::string("--global-batch 8 ") + mesh + " --stage " + std::to_string(stage));
      expect_close(other["loss"], one["loss"], 1e-5);
      expect_close(other["gradient_norm"], one["gradient_norm"], 1e-4);
      EXPECT_NEAR(other["held_out_loss"].get<double>(), one["held_out_loss"].get<double>(), 1e-4);
      EXPECT_EQ(other["parameters"], one["parameters"]);
    }
  }
}

TEST_F(MeshFlagsTest, ARankHoldsItsShardOfItsSlices) {
  const auto whole = run("--ranks 2 --stage 3");
  const auto cut = run("--ranks 4 --tensor 2 --stage 3");
  const auto grouped = run("--ranks 4 --shard-within 2 --stage 3");
  const auto bytes = [](const nlohmann::json& of_run, const char* key) {
    return of_run["memory"][0][key].get<double>();
  };
  for (const auto* of_run : {&whole, &cut, &grouped}) {
    // Slots of 64 bytes and shards of 256 elements weigh on so small a model.
    EXPECT_NEAR(bytes(*of_run, "persistent_bytes") / bytes(*of_run, "formula_bytes"), 1, 0.1);
  }
  EXPECT_LT(bytes(cut, "formula_bytes"), 0.6 * bytes(whole, "formula_bytes"));
  EXPECT_EQ(bytes(grouped, "formula_bytes"), bytes(whole, "formula_bytes"));
  const auto sent = [](const nlohmann::json& of_run, const char* axis, const char* operation) {
    return of_run["wire_bytes_by_axis"][0][axis][operation].get<int64_t>();
  };
  EXPECT_GT(sent(cut, "tensor", "all_reduce"), 0);
  EXPECT_EQ(sent(whole, "tensor", "all_reduce"), 0);
  EXPECT_GT(sent(grouped, "replica", "all_reduce"), 0);
  EXPECT_EQ(sent(grouped, "replica", "all_gather"), 0);
  EXPECT_EQ(sent(grouped, "data", "reduce_scatter"), 0);
  EXPECT_TRUE(cut["weights_sha256"].is_null());
  EXPECT_EQ(grouped["weights_sha256"], run("--ranks 4 --stage 3")["weights_sha256"]);
}

TEST_F(MeshFlagsTest, WhatIsSimulatedIsSentAndHeld) {
  for (const std::string mesh :
       {"--ranks 4 --tensor 2", "--ranks 4 --tensor 4", "--ranks 6 --tensor 2"}) {
    for (const char* stage : {" --stage 1", " --stage 3"}) {
      SCOPED_TRACE(mesh + stage);
      const auto real = run(mesh + stage);
      const auto simulated = run(mesh + stage + " --communicator simulated");
      for (size_t rank = 0; rank < real["memory"].size(); ++rank) {
        const auto& planned = simulated["memory"][rank];
        const auto& held = real["memory"][rank];
        EXPECT_EQ(planned["formula_bytes"], held["formula_bytes"]) << rank;
        // Allocations are of whole 64 bytes.
        EXPECT_NEAR(planned["persistent_bytes"].get<double>(), held["persistent_bytes"], 128);
        EXPECT_EQ(simulated["wire_bytes_by_axis"][rank]["tensor"],
                  real["wire_bytes_by_axis"][rank]["tensor"])
            << rank;
      }
    }
  }
}

TEST_F(MeshFlagsTest, AStateGoesOnOverTheSameMeshAndOverOthers) {
  const std::string flags = "--global-batch 4 --dropout 0.1 --steps 6 ";
  const std::string cut = flags + "--ranks 4 --tensor 2 --stage 3 ";
  const auto whole_run = run(cut);
  run(cut + "--steps 3 --save " + path("run"));
  // Dropout goes on with the same masks.
  const auto resumed = run(cut + "--resume " + path("run"));
  ASSERT_EQ(resumed["loss"].size(), 3U);
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_EQ(resumed["loss"][step], whole_run["loss"][step + 3]) << step;
  }
  EXPECT_EQ(resumed["held_out_loss"], whole_run["held_out_loss"]);
  const auto other = run("--global-batch 4 --steps 4 --ranks 2 --resume " + path("run"));
  EXPECT_NEAR(other["loss"][0].get<double>(), whole_run["loss"][3].get<double>(), 0.05);
}

TEST_F(MeshFlagsTest, RefusesWhatHasNoSlices) {
  const auto refused = [&](const std::string& flags, const char* words) {
    expect_refused(train_gpt(flags), words);
  };
  refused("--ranks 3 --tensor 2", "--tensor 2: does not divide the 3 ranks");
  refused("--ranks 3 --tensor 3 --heads 4", "--tensor 3: does not divide --heads 4");
  refused("--ranks 2 --tensor 2 --deferred on", "layers are cut when they have values");
  refused("--ranks 2 --tensor 2 --checkpoint-activations budget:1MiB",
          "would each choose what to repeat");
}

}  // namespace
}  // namespace mesh_flags_test
