// `zp plan` as users type it.
#include <sys/resource.h>

#include "tests/examples/train_gpt_run.h"

namespace plan_command_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

class PlanCommandTest : public TrainGptTest {
 protected:
  static Outcome plan(const std::string& flags) { return shell(ZP " plan " + flags); }
  // What `zp plan` becomes, which is started often here.
  static Outcome warm_plan(const std::string& flags) { return run_program(ZP_PLAN " " + flags); }

  static nlohmann::json planned(const std::string& flags) {
    const Outcome outcome = plan("--json " + flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return nlohmann::json::parse(outcome.output);
  }

  std::string config(const std::string& text) const {
    std::ofstream(path("config.json")) << text;
    return "--sequence 16 --config " + path("config.json");
  }
};

const std::string kTiny = "--model gpt:d=64,layers=2,heads=2,vocabulary=100 --sequence 16 ";

TEST_F(PlanCommandTest, PrintsTheTableTheChoiceTheNextBestAndTheLimit) {
  const Outcome outcome = plan(kTiny + "--batch 4 --world 64 --device-memory 80GiB");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr(" parameters on 64 ranks, 8 a host"));
  EXPECT_THAT(outcome.output, HasSubstr("\n* "));
  EXPECT_THAT(outcome.output, HasSubstr("\nchoice: stage "));
  EXPECT_THAT(outcome.output, HasSubstr("\nlimited by device memory: "));
  EXPECT_THAT(outcome.output, HasSubstr("\nnext best: stage "));
}

TEST_F(PlanCommandTest, PlansEveryStageOffloadAndPolicyAsJson) {
  const auto found = planned(kTiny + "--world 4");
  EXPECT_EQ(found["settings"].size(), 14U * 3);
  EXPECT_EQ(found["choice"], 0);
  for (const auto& setting : found["settings"]) {
    EXPECT_GT(setting["at_peak"]["device"]["total"], 0);
    EXPECT_GT(setting["sent"]["within_host"]["bytes"], 0);
    EXPECT_GT(setting["flops"], 0);
  }
}

// Nothing of its 3 TB is there.
TEST_F(PlanCommandTest, PlansGpt3OnAThousandRanksInLittleMemory) {
  const auto found = planned(
      "--model gpt:d=12288,layers=96,heads=96 --sequence 2048 --world 1024 --compute-dtype bf16 "
      "--device-memory 80GiB");
  EXPECT_EQ(found["parameters"], 174604259328);
  const auto& choice = found["settings"][found["choice"].get<size_t>()];
  EXPECT_EQ(choice["stage"], "3");
  EXPECT_LE(choice["at_peak"]["device"]["total"], int64_t{80} << 30);
  rusage of_children{};
  ::getrusage(RUSAGE_CHILDREN, &of_children);
  EXPECT_LT(of_children.ru_maxrss, 500'000'000 / 1024);
}

TEST_F(PlanCommandTest, ExitsWithOneWhereNothingFits) {
  const Outcome outcome = plan(kTiny + "--device-memory 1KB --host-memory 1KB");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("nothing fits; nearest: "));
}

// Numbers of parameters that the models are published with.
TEST_F(PlanCommandTest, ReadsConfigsOfGpt2LlamaMistralAndQwen2) {
  const auto gpt2 = planned(config(
      R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
          "n_positions": 1024, "n_inner": null})"));
  EXPECT_EQ(gpt2["parameters"], 124439808);
  const auto llama = planned(config(
      R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
          "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
          "tie_word_embeddings": true})"));
  EXPECT_EQ(llama["parameters"], 1235814400);
  const auto mistral = planned(config(
      R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096})"));
  EXPECT_EQ(mistral["parameters"], 7241732096);
  // Queries, keys and values have biases.
  const auto qwen2 = planned(config(
      R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
          "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": true})"));
  EXPECT_EQ(qwen2["parameters"], 494032768);
}

// At stage 0 on the device: of the blocks' matrices Muon has one state, AdamW two of everything.
TEST_F(PlanCommandTest, PlansOptimizersOfWholeTensors) {
  const auto states = [](const std::string& optimizer) {
    const auto found = planned(kTiny + "--world 2 --optimizer " + optimizer);
    for (const auto& setting : found["settings"]) {
      if (setting["stage"] != "0" || setting["offload_optimizer"] != "device") continue;
      return setting["held"]["device"]["optimizer_state"].get<int64_t>();
    }
    return int64_t{0};
  };
  constexpr int64_t kMatrixBytes = 2 * 12 * 64 * 64 * 4;  // of two blocks
  EXPECT_EQ(states("lamb"), states("adamw"));
  EXPECT_NEAR(states("muon"), states("adamw") - kMatrixBytes, 1000);
  // A number for each row and column, and for each element of vectors.
  EXPECT_LT(states("adafactor"), states("adamw") / 20);
  EXPECT_GT(states("adafactor"), 0);
}

// The setting of stage 0 on the device, with all activations kept.
nlohmann::json plainest(const nlohmann::json& plan) {
  for (const auto& setting : plan["settings"]) {
    if (setting["stage"] == "0" && setting["offload_optimizer"] == "device" &&
        setting["checkpoint"] == "none") {
      return setting;
    }
  }
  return {};
}

TEST_F(PlanCommandTest, PlansRanksThatShareEachSamplesTokens) {
  const std::string model =
      "--model llama:d=64,layers=4,heads=8,key_heads=2 --sequence 4096 --world 4 --workspace 0 ";
  const auto whole = planned(model), four = planned(model + "--context 4");
  const auto by_heads = planned(model + "--context 4 --context-form ulysses");
  const auto activations = [](const nlohmann::json& plan) {
    return plainest(plan)["at_peak"]["device"]["activation"].get<double>();
  };
  const auto sent = [](const nlohmann::json& plan) {
    return plainest(plan)["sent"]["within_host"]["bytes"].get<int64_t>();
  };
  EXPECT_EQ(whole["parameters"], four["parameters"]);
  EXPECT_EQ(four["world"]["context"], 4);
  EXPECT_EQ(four["sequence"], 4096);
  EXPECT_NEAR(activations(four) / activations(whole), 0.25, 0.05);
  EXPECT_NEAR(activations(by_heads) / activations(whole), 0.25, 0.05);
  EXPECT_NEAR(plainest(four)["flops"].get<double>() / plainest(whole)["flops"].get<double>(), 0.25,
              1e-9);
  // Keys and values of a rank, 3 turns in forward, and in backward 3 and 4 of their gradients. Heads are repeated before they
  // travel, as the model has no grouped attention.
  constexpr int64_t kPart = 1024 * 64 * 4;
  EXPECT_EQ(sent(four) - sent(whole), 4 * ((3 + 3) * (2 * kPart + 8) + 4 * 2 * kPart));
  EXPECT_EQ(sent(by_heads) - sent(whole), 4 * 2 * 4 * 3 * (kPart / 4 + 8));
  const Outcome table = plan(model + "--context 4");
  EXPECT_THAT(table.output, HasSubstr("each sample of 4096 tokens is on 4 ranks, 1024 a rank\n"));
}

// With 1 / P of the activations on a rank, P times the tokens.
TEST_F(PlanCommandTest, FindsTheLongestSequenceThatFits) {
  const std::string model =
      "--model llama:d=64,layers=2,heads=4 --world 4 --workspace 0 --host-memory 1MiB "
      "--page-bytes 64KiB --device-memory ";
  const auto longest = [&](const std::string& flags) {
    return planned(model + "512MiB " + flags + "--longest-sequence")["sequence"].get<int64_t>();
  };
  const int64_t on_one = longest(""), on_four = longest("--context 4 ");
  EXPECT_GT(on_one, 0);
  EXPECT_EQ(on_four % 8, 0);
  EXPECT_NEAR(static_cast<double>(on_four) / static_cast<double>(on_one), 4, 1);
  // It fits, and 5 % more does not.
  const auto with = [&](int64_t sequence) {
    return warm_plan(model + "512MiB --context 4 --sequence " + std::to_string(sequence)).exit_code;
  };
  EXPECT_EQ(with(on_four), 0);
  EXPECT_EQ(with(on_four / 20 * 21 / 8 * 8), 1);
  const Outcome table = plan(model + "512MiB --context 4 --longest-sequence");
  EXPECT_THAT(table.output, HasSubstr("the longest sequence that fits: " + std::to_string(on_four) +
                                      " tokens\n"));
  EXPECT_EQ(plan(model + "1KiB --longest-sequence").exit_code, 1);
  // A model's table of positions ends it.
  EXPECT_EQ(planned("--model gpt:d=64,layers=1,heads=2,positions=1000 --device-memory 80GiB "
                    "--longest-sequence")["sequence"],
            1000);
}

// What LibTorch keeps of an MLP of that kind: the gate, its silu, the other factor and their product.
TEST_F(PlanCommandTest, PlansMlpsAndLossInTiles) {
  const std::string model =
      "--model llama:d=64,layers=4,heads=8,vocabulary=1000 --sequence 8192 --world 4 --workspace "
      "0 ";
  const auto whole = plainest(planned(model)), tiled = plainest(planned(model + "--tiled-mlp"));
  const auto both = plainest(planned(model + "--tiled-mlp --tiled-loss"));
  const auto activations = [](const nlohmann::json& setting) {
    return setting["at_peak"]["device"]["activation"].get<double>();
  };
  constexpr double kWidthOfMlp = 256, kTokens = 8192, kTile = 512;
  EXPECT_NEAR(activations(whole) - activations(tiled), 4 * 4 * kTokens * kWidthOfMlp * 4,
              4 * 4 * kTile * kWidthOfMlp * 4);
  // All but the last of its three products is computed again.
  EXPECT_NEAR(tiled["flops"].get<double>() - whole["flops"].get<double>(),
              4 * 2 * 2 * kTokens * 64 * kWidthOfMlp, 1);
  EXPECT_EQ(both["flops"], tiled["flops"]);
  // The logits, once at least: those of one tile stay.
  const double logits = kTokens * 1000 * 4;
  EXPECT_GT(tiled["at_peak"]["device"]["total"].get<double>() -
                both["at_peak"]["device"]["total"].get<double>(),
            logits);
  for (const std::string what :
       {"--parameters 7B", "--sequence 64 --model gpt:d=64,layers=1,heads=2,experts=4"}) {
    const Outcome refused = warm_plan(what + " --tiled-mlp");
    EXPECT_EQ(refused.exit_code, 2) << refused.output;
    EXPECT_THAT(refused.output, HasSubstr("--tiled-mlp"));
  }
}

// Where all tokens take all experts they are spread evenly, as in a plan.
TEST_F(PlanCommandTest, PlansExpertsOverRanksAsARunHoldsAndSendsThem) {
  // What cuBLASLt keeps for two threads.
  constexpr int64_t kWorkspaceBytes = int64_t{2} << 20;
  for (const char* mesh : {"--expert-parallel 2", "--expert-parallel 4",
                           "--expert-parallel 2 --context 2", "--expert-parallel 1"}) {
    const auto found = planned(
        "--model gpt:d=32,layers=2,heads=2,vocabulary=257,experts=4,active=4 --sequence 32 --batch "
        "2 --world 4 --page-bytes 16MiB --workspace 0 " +
        std::string(mesh));
    for (const char* stage : {"1", "3"}) {
      SCOPED_TRACE(std::string(mesh) + " --stage " + stage);
      const std::string flags =
          std::string("--experts 4 --active 4 --ranks 4 --stage ") + stage + " " + mesh;
      const auto shorter = run(flags + " --steps 2"), held = run(flags);
      for (const auto& setting : found["settings"]) {
        if (setting["stage"] != stage || setting["offload_optimizer"] != "device" ||
            setting["checkpoint"] != "none") {
          continue;
        }
        const auto& memory = held["memory"][0];
        EXPECT_EQ(found["parameters"], held["parameters"]);
        EXPECT_EQ(setting["held"]["device"]["total"], memory["persistent_bytes"]);
        const auto peak = static_cast<double>(memory["peak_bytes"].get<int64_t>() -
                                              memory["at_peak"]["staging"].get<int64_t>());
        EXPECT_NEAR(setting["at_peak"]["device"]["total"].get<double>() - kWorkspaceBytes, peak,
                    0.03 * peak);
        // What a step sends. A run also averages its loss, and ranks with the same experts tell each other that they are in the same step.
        int64_t sent = 0;
        for (const auto& [operation, bytes] : held["wire_bytes"][0].items()) {
          if (operation == "rank") continue;
          sent += bytes.get<int64_t>() - shorter["wire_bytes"][0][operation].get<int64_t>();
        }
        const bool has_same_experts = std::string(mesh).starts_with("--expert-parallel 2");
        EXPECT_EQ(setting["sent"]["within_host"]["bytes"].get<int64_t>() + 3 * 8 +
                      (has_same_experts ? 48 : 0),
                  sent);
      }
    }
  }
}

// A token takes a quarter of the products of all experts, wherever these are.
TEST_F(PlanCommandTest, PlansTheProductsOfTheExpertsThatATokenTakes) {
  const std::string model = "--model llama:d=64,layers=2,heads=4,vocabulary=64,ffn=256";
  const std::string rest = " --sequence 64 --batch 2 --world 4 ";
  const auto dense = planned(model + rest);
  const auto experts = planned(model + ",experts=8,active=2" + rest);
  const auto flops = [](const nlohmann::json& plan) {
    return plainest(plan)["flops"].get<double>();
  };
  // Beside the experts' there are those of the router.
  constexpr double kRouter = 3 * 2 * 2 * 2 * 64 * 64 * 8;
  EXPECT_NEAR(flops(experts) - kRouter, flops(dense), 1);
  EXPECT_EQ(experts["parameters"].get<int64_t>() - dense["parameters"].get<int64_t>(),
            2 * (3 * 3 * 256 * 64 + 8 * 64));
  const auto spread = planned(model + ",experts=8,active=2" + rest + "--expert-parallel 4");
  EXPECT_EQ(flops(spread), flops(experts));
  EXPECT_EQ(spread["parameters"], experts["parameters"]);
  EXPECT_EQ(spread["world"]["expert"], 4);
  EXPECT_LT(plainest(spread)["held"]["device"]["total"].get<double>(),
            0.5 * plainest(experts)["held"]["device"]["total"].get<double>());
  const Outcome table = plan(model + ",experts=8" + rest + "--expert-parallel 4");
  EXPECT_THAT(table.output, HasSubstr("the experts of a layer are on 4 ranks"));
}

// Numbers of parameters that the models are published with.
TEST_F(PlanCommandTest, ReadsConfigsOfMixtures) {
  const auto spread = [&](const std::string& text) {
    return planned(config(text) + " --world 4 --expert-parallel 4");
  };
  const auto mixtral = spread(
      R"({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
          "num_experts_per_tok": 2})");
  EXPECT_EQ(mixtral["parameters"], 46702792704);
  // With biases of queries, keys and values, and an expert that all tokens take.
  const auto qwen2 = spread(
      R"({"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
          "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60,
          "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
          "mlp_only_layers": []})");
  EXPECT_EQ(qwen2["parameters"], 14315784192);
  // With norms of heads.
  const auto qwen3 = spread(
      R"({"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
          "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
          "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})");
  EXPECT_EQ(qwen3["parameters"], 30532122624);
}

TEST_F(PlanCommandTest, ReadsWhichLayersOfAMixtureHaveExperts) {
  const auto parameters = [&](const std::string& sparse) {
    return planned(config(R"({"model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 96,
        "num_hidden_layers": 8, "num_attention_heads": 2, "vocab_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 40)" +
                          sparse + "}"))["parameters"]
        .get<int64_t>();
  };
  // Layers 1, 3, 5 and 7 would have some, and 3 is taken out.
  EXPECT_EQ(parameters("") - parameters(R"(, "decoder_sparse_step": 2, "mlp_only_layers": [3])"),
            5 * 32 * (4 + 3 * (4 * 40 - 96)));
}

TEST_F(PlanCommandTest, PlansStatesOfAMereNumber) {
  const auto found =
      planned("--parameters 7.5B --world 64 --compute-dtype bf16 --accumulate-dtype bf16");
  EXPECT_EQ(found["has_steps"], false);
  for (const auto& setting : found["settings"]) {
    if (setting["stage"] != "3" || setting["offload_optimizer"] != "device") continue;
    // 14 bytes a parameter: gradients, 2 more, are there from backward to zero_grad() alone.
    EXPECT_EQ(setting["held"]["device"]["total"], 1640625000);
  }
}

TEST_F(PlanCommandTest, NoticesThatItsOutputCannotBeWritten) {
  for (const std::string& command :
       {std::string(ZP) + " plan --parameters 7B > /dev/full",
        std::string(ZP) + " plan --parameters 7B --json > /dev/full",
        std::string(ZP) + " schedule --pipeline 2 --micro-batches 2 > /dev/full",
        std::string(ZP) + " topology > /dev/full", std::string(ZP) + " --help > /dev/full"}) {
    const Outcome outcome = shell(command);
    EXPECT_NE(outcome.exit_code, 0) << command;
    EXPECT_THAT(outcome.output, HasSubstr("the output cannot be written: No space left on device"))
        << command;
  }
}

TEST_F(PlanCommandTest, RefusesBadCommandLinesInOneLine) {
  const auto refused = [](const std::string& flags, const std::string& words) {
    expect_refused(warm_plan(flags), words);
  };
  refused("", "--model");
  refused("--model gpt:d=64,layers=2,heads=2", "--sequence is required");
  refused(kTiny + "--device-memory 80G", "80GB, which is 80000000000 bytes, or 80GiB, which is");
  refused(kTiny + "--page-bytes 64M", "64MB, which is 64000000 bytes, or 64MiB, which is");
  refused(kTiny + "--device-memory much", "expected a size such as 4096, 64KiB, 80GiB or 80GB");
  refused(kTiny + "--world 5000", "--world");
  refused(kTiny + "--parameters 7B", "--parameters");
  refused(kTiny + "--accumulate-dtype fp16 --compute-dtype bf16", "options.accumulate_dtype");
  refused("--parameters many", "expected a number such as 7.5B");
  const std::string model = "--sequence 8 --model ";
  refused(model + "bert:d=64", "expected gpt:... or llama:...");
  refused(model + "gpt:d=64,layers=2", "expected heads=NUMBER, which is missing");
  refused(model + "gpt:d=64,layers=2,heads=3", "cannot be cut into 3 heads");
  refused(model + "gpt:d=64,layers=2,heads=2,depth=3", "unknown key depth");
  refused(model + "gpt:d=64,d=32,layers=2,heads=2", "d is given twice");
  refused(model + "gpt:d=wide,layers=2,heads=2", "expected a whole number for d");
  refused(model + "llama:d=64,layers=2,heads=4,key_heads=3", "cannot share 3 heads of keys");
  refused(model + "gpt:d=64,layers=0,heads=2", "expected layers of 1 or more");
  refused(model + "gpt:d=64,layers=1,heads=2,positions=4", "the model has 4 positions");
  refused(kTiny + "--world 4 --context 3", "does not divide the 4 ranks of --world");
  refused(kTiny + "--world 16 --context 16", "a multiple of 32, got 16");
  refused(kTiny + "--world 4 --context 4 --context-form ulysses", "the model's 2 heads; use ring");
  refused(kTiny + "--context-form linear", "--context-form");
  refused("--parameters 7B --world 2 --context 2", "of --parameters no sample is known");
  refused("--parameters 7B --world 2 --expert-parallel 2", "of --parameters no experts are known");
  refused(kTiny + "--world 4 --expert-parallel 2", "the model has no experts; add experts=E");
  const std::string of_experts =
      "--model gpt:d=64,layers=2,heads=2,vocabulary=100,experts=6 --sequence 16 ";
  refused(of_experts + "--world 4 --expert-parallel 4", "does not divide the 6 experts of a layer");
  refused(of_experts + "--world 4 --context 4 --expert-parallel 2",
          "does not divide the 1 ranks of --world that have other samples");
  refused(of_experts + "--world 2 --expert-parallel 2 --optimizer lamb", "wants whole tensors");
  refused(model + "gpt:d=64,layers=2,heads=2,experts=4,active=5,expert_ffn=8", "got 5 of 4");
  refused(model + "gpt:d=64,layers=2,heads=2,experts=4,active=3", "do not divide ffn=256");
  refused(model + "gpt:d=64,layers=2,heads=2,active=3", "unknown key active");
  refused(kTiny + "--longest-sequence", "expected --device-memory, in which it is to fit");
}

TEST_F(PlanCommandTest, RefusesConfigsThatItDoesNotKnow) {
  const auto refused = [&](const std::string& text, const std::string& words) {
    expect_refused(warm_plan(config(text)), words);
  };
  refused(R"({"model_type": "bert"})",
          "\"model_type\" is \"bert\", but gpt2, llama, mistral, qwen2, mixtral, qwen2_moe and "
          "qwen3_moe are known");
  refused(R"({"model_type": "llama", "num_local_experts": 8})",
          "experts are known of mixtral, qwen2_moe and qwen3_moe");
  refused(
      R"({"model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
              "intermediate_size": 64, "vocab_size": 100})",
      "expected \"num_experts\"");
  refused(R"({"n_embd": 768})", "\"model_type\" is missing");
  refused(R"({"model_type": "gpt2", "n_embd": "wide", "n_head": 2})",
          "\"n_embd\": expected a whole number");
  refused(R"({"model_type": "gpt2", "n_embd": 768})", "expected \"n_head\"");
  refused("no json", "expected a JSON object");
  expect_refused(plan("--sequence 8 --config /none"), "--config /none: cannot be read");
}

}  // namespace
}  // namespace plan_command_test
