// --tensor, --context and --shard-within: every mesh trains to one rank's losses and norms.
#include "tests/examples/train_gpt_run.h"

namespace mesh_flags_test {
namespace {

using namespace zeropage::testing;

class MeshFlagsTest : public TrainGptTest {
 protected:
  nlohmann::json run(const std::string& flags) const {
    return TrainGptTest::run("--heads 4 " + flags);
  }
};

// At the first step, and at all of them; relative.
struct Tolerance {
  double first;
  double all;
};

void expect_close(const nlohmann::json& got, const nlohmann::json& expected,
                  const Tolerance& tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t step = 0; step < got.size(); ++step) {
    EXPECT_NEAR(got[step].get<double>() / expected[step].get<double>(), 1,
                step == 0 ? tolerance.first : tolerance.all)
        << "step " << step;
  }
}

struct MeshFlags {
  int ranks;
  int tensor;
  const char* more;

  // One micro-step a step, of eight samples over all ranks.
  std::string text() const {
    return "--ranks " + std::to_string(ranks) + " --tensor " + std::to_string(tensor) +
           " --batch " + std::to_string(8 * tensor / ranks) + " " + more;
  }
};

TEST_F(MeshFlagsTest, EveryMeshHasOneRanksLossesAndNorms) {
  const auto train = [&](const MeshFlags& mesh, const std::string& flags) {
    return run("--heads 8 --clip-norm 1 " + flags + mesh.text());
  };
  const auto compare = [&](const nlohmann::json& one, const MeshFlags& mesh,
                           const std::string& flags, const Tolerance& tolerance) {
    SCOPED_TRACE(flags + mesh.text());
    const auto other = train(mesh, flags);
    expect_close(other["loss"], one["loss"], tolerance);
    expect_close(other["gradient_norm"], one["gradient_norm"], tolerance);
    EXPECT_EQ(other["parameters"], one["parameters"]);
    EXPECT_NEAR(other["held_out_loss"].get<double>() / one["held_out_loss"].get<double>(), 1,
                tolerance.all);
  };
  const std::string in_double = "--compute-dtype fp64 ";
  const auto one = train({1, 1, ""}, in_double);
  EXPECT_EQ(one["flags"]["compute-dtype"], "fp64");
  // Each axis by itself and both, and each stage.
  for (const MeshFlags& mesh :
       {MeshFlags{2, 2, "--stage 3"}, MeshFlags{4, 2, "--stage 0"}, MeshFlags{4, 4, "--stage 2"},
        MeshFlags{4, 1, "--stage 3 --shard-within 2"}, MeshFlags{8, 8, "--stage 1"},
        MeshFlags{8, 2, "--stage 2 --shard-within 2"}}) {
    compare(one, mesh, in_double, {.first = 1e-12, .all = 1e-12});
  }
  const std::string in_float = "--steps 10 ";
  const auto one_in_float = train({1, 1, ""}, in_float);
  for (const MeshFlags& mesh : {MeshFlags{4, 2, "--stage 3"}, MeshFlags{8, 4, "--stage 1"}}) {
    compare(one_in_float, mesh, in_float, {.first = 1e-6, .all = 1e-5});
  }
}

int64_t sent(const nlohmann::json& of_run, const char* axis, const char* operation) {
  return of_run["wire_bytes_by_axis"][0][axis][operation].get<int64_t>();
}

TEST_F(MeshFlagsTest, RanksThatShareSamplesHaveOneRanksLossesAndNorms) {
  const std::string fixed = "--heads 8 --sequence 32 --clip-norm 1 --compute-dtype fp64 ";
  const auto one = run(fixed + "--batch 4");
  for (const char* shared :
       {"--ranks 2 --context 2 --batch 4 --stage 3", "--ranks 4 --context 4 --batch 4 --stage 2",
        "--ranks 4 --context 2 --batch 2 --stage 0",
        "--ranks 4 --context 2 --tensor 2 --batch 4 --stage 1",
        "--ranks 2 --context 2 --context-form ulysses --batch 4 --stage 3",
        "--ranks 4 --context 2 --context-form ulysses --batch 2 --accumulate 1 --stage 1",
        "--ranks 2 --context 2 --batch 2 --accumulate 2 --checkpoint-activations every:1"}) {
    SCOPED_TRACE(shared);
    const auto other = run(fixed + shared);
    expect_close(other["loss"], one["loss"], {.first = 1e-12, .all = 1e-11});
    expect_close(other["gradient_norm"], one["gradient_norm"], {.first = 1e-12, .all = 1e-11});
    EXPECT_NEAR(other["held_out_loss"].get<double>() / one["held_out_loss"].get<double>(), 1,
                1e-11);
    EXPECT_GT(sent(other, "context", "send") + sent(other, "context", "all_to_all"), 0);
  }
}

TEST_F(MeshFlagsTest, ARunWhoseRanksShareSamplesGoesOnWhereTheyDoNot) {
  const std::string fixed = "--sequence 32 --compute-dtype fp64 ";
  const auto whole = run(fixed + "--batch 4 --steps 6");
  run(fixed + "--ranks 2 --context 2 --batch 4 --stage 3 --steps 3 --save " + path("run"));
  const auto resumed =
      run(fixed + "--ranks 2 --batch 2 --stage 1 --steps 6 --resume " + path("run"));
  ASSERT_EQ(resumed["loss"].size(), 3U);
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_NEAR(resumed["loss"][step].get<double>(), whole["loss"][step + 3].get<double>(), 1e-11);
  }
}

TEST_F(MeshFlagsTest, WhatRanksThatShareSamplesCannotDoIsRefused) {
  expect_refused(train_gpt("--ranks 2 --context 2 --sequence 34"), "a multiple of 4, got 34");
  expect_refused(train_gpt("--ranks 3 --context 2"), "does not divide the 3 ranks");
  expect_refused(train_gpt("--ranks 3 --context 3 --heads 4 --sequence 36 --context-form ulysses"),
                 "does not divide 4 heads");
  expect_refused(train_gpt("--ranks 2 --context 2 --dropout 0.1"), "leave --dropout out");
  expect_refused(train_gpt("--ranks 2 --context 2 --sample 8"), "leave --sample out");
  expect_refused(train_gpt("--context-form ulysses"), "use --context RANKS");
}

TEST_F(MeshFlagsTest, Fp64RefusesWhatIsInFp32Alone) {
  for (const char* flags : {"--reduce-dtype fp32", "--accumulate-dtype fp32", "--world-invariant",
                            "--optimizer-state 8bit", "--offload-optimizer host"}) {
    expect_refused(train_gpt(std::string("--compute-dtype fp64 ") + flags),
                   "leave it or --compute-dtype fp64 out");
  }
  for (const char* flags : {"--low-precision-update split", "--keep-fp32 *norm"}) {
    expect_refused(train_gpt(std::string("--compute-dtype fp64 ") + flags),
                   "use --compute-dtype bf16 or fp16");
  }
}

TEST_F(MeshFlagsTest, ARankHoldsTheFormulasShardOfItsSlices) {
  const auto formula_of = [&](const std::string& mesh) {
    SCOPED_TRACE(mesh);
    const auto of_run = run("--d-model 256 --sequence 16 --batch 1 --steps 1 " + mesh);
    for (const auto& of_rank : of_run["memory"]) {
      EXPECT_NEAR(
          of_rank["persistent_bytes"].get<double>() / of_rank["formula_bytes"].get<double>(), 1,
          0.005);
    }
    return of_run["memory"][0]["formula_bytes"].get<double>();
  };
  const double whole = formula_of("--ranks 2 --stage 3");
  EXPECT_LT(formula_of("--ranks 4 --tensor 2 --stage 3"), 0.51 * whole);
  EXPECT_EQ(formula_of("--ranks 4 --shard-within 2 --stage 3"), whole);
  EXPECT_LT(formula_of("--ranks 8 --tensor 4 --stage 1"), 0.8 * whole);
}

// Longer samples differ in activations, and in the positions' embedding.
TEST_F(MeshFlagsTest, SlicesSendTheActivationsThatTheFormulaSays) {
  constexpr int64_t kSteps = 2, kTokens = 2 * 32, kWidth = 32, kLayers = 2, kVocabulary = 257;
  for (const int64_t tensor : {2, 4}) {
    const std::string mesh = "--steps 2 --ranks " + std::to_string(2 * tensor) + " --tensor " +
                             std::to_string(tensor) + " --sequence ";
    const auto shorter = run(mesh + "32"), longer = run(mesh + "64");
    const auto more = [&](const char* operation) {
      return sent(longer, "tensor", operation) - sent(shorter, "tensor", operation);
    };
    // Each of so few bytes goes to all others at once. In forward the embedding and two rows a layer, in
    // backward two columns a layer and the tied head.
    EXPECT_EQ(more("all_reduce"), kSteps * (2 + 4 * kLayers) * kTokens * kWidth * 4 * (tensor - 1));
    // The logits, in slices as long as the longest.
    const int64_t slice = (kVocabulary + tensor - 1) / tensor;
    EXPECT_EQ(more("all_gather"), kSteps * kTokens * slice * 4 * (tensor - 1));
    // The longer positions' values, from rank 0 to all others: when the model is cut, and when it is wrapped.
    EXPECT_EQ(more("broadcast"), 2 * 32 * kWidth * 4 * (tensor - 1));
    EXPECT_EQ(more("reduce_scatter"), 0);
  }
}

TEST_F(MeshFlagsTest, WhatIsSentIsToldByAxis) {
  const auto whole = run("--ranks 2 --stage 3");
  const auto cut = run("--ranks 4 --tensor 2 --stage 3");
  const auto grouped = run("--ranks 4 --shard-within 2 --stage 3");
  EXPECT_EQ(sent(whole, "tensor", "all_reduce"), 0);
  EXPECT_GT(sent(grouped, "replica", "all_reduce"), 0);
  EXPECT_EQ(sent(grouped, "replica", "all_gather"), 0);
  EXPECT_EQ(sent(grouped, "data", "reduce_scatter"), 0);
  EXPECT_EQ(sent(cut, "tensor", "reduce_scatter"), 0);
  // Half of the slices, which are half of most layers.
  EXPECT_LT(sent(cut, "data", "reduce_scatter"), 0.6 * sent(whole, "data", "reduce_scatter"));
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

TEST_F(MeshFlagsTest, ASimulatedRunWhoseRanksShareSamplesSendsAndHoldsWhatARealOneDoes) {
  for (const char* mesh :
       {"--ranks 2 --context 2 --stage 0", "--ranks 4 --context 4 --stage 3",
        "--ranks 4 --context 2 --stage 3", "--ranks 4 --context 2 --tensor 2 --stage 1",
        "--ranks 4 --context 4 --context-form ulysses --stage 2",
        "--ranks 4 --context 2 --context-form ulysses --stage 3 --checkpoint-activations "
        "every:1"}) {
    SCOPED_TRACE(mesh);
    const std::string flags = std::string("--heads 4 --sequence 32 --batch 4 ") + mesh;
    const auto real = run(flags);
    const auto simulated = run(flags + " --communicator simulated");
    for (size_t rank = 0; rank < real["memory"].size(); ++rank) {
      for (const char* axis : {"context", "data", "tensor"}) {
        EXPECT_EQ(simulated["wire_bytes_by_axis"][rank][axis],
                  real["wire_bytes_by_axis"][rank][axis])
            << axis << " of rank " << rank;
      }
      const auto& planned = simulated["memory"][rank];
      const auto& held = real["memory"][rank];
      EXPECT_NEAR(planned["persistent_bytes"].get<double>(), held["persistent_bytes"], 128);
      const auto peak = held["peak_bytes"].get<double>() - held["at_peak"]["staging"].get<double>();
      EXPECT_NEAR(planned["peak_bytes"].get<double>(), peak, 0.03 * peak);
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
