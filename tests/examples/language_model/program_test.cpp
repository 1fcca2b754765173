// zp-lm, run as users run it. ZP_LM is its path.
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "examples/language_model/weights/safetensors_writer.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/shell.h"
#include "tests/text/small_vocabulary.h"

namespace zeropage::program_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class LanguageModelProgramTest : public ::testing::Test {
 protected:
  // A model that knows the small vocabulary, its tokenizer, and a text.
  LanguageModelProgramTest() {
    language_model::ModelConfig config = small_llama();
    config.vocabulary = static_cast<int64_t>(SmallVocabulary().tokens.size());
    config.context = 64;
    const auto model = drawn(config);
    scratch_.put("config.json", to_json(model->config(), "float32").dump());
    scratch_.put("tokenizer.json", SmallVocabulary().tokenizer_json().dump());
    std::vector<language_model::SafetensorsWriter::Entry> entries;
    for (const auto& parameter : model->named_parameters()) {
      if (parameter.key() == "lm_head.weight") continue;
      entries.push_back({parameter.key(), parameter.value().sizes().vec()});
    }
    language_model::SafetensorsWriter file(scratch_ / "model.safetensors", entries);
    for (const auto& entry : entries) file.write(entry.name, model->named_parameters()[entry.name]);
    file.finish();
    std::string text;
    for (int i = 0; i < 120; ++i) text += "hello there, " + std::to_string(i * i) + " times. ";
    scratch_.put("text.txt", text);
  }

  std::string path(const std::string& name) const { return (scratch_ / name).string(); }
  Outcome run(const std::string& arguments) const {
    return shell(std::string(ZP_LM) + " " + arguments);
  }
  // With the model, on two ranks of one thread.
  Outcome run_model(const std::string& command, const std::string& more) const {
    return run(command + " --model " + scratch_.path().string() + " --threads 1 --ranks 2 --json " +
               path("out.json") + " " + more);
  }
  // Each step's loss of a run that wrote json(), and the last one on held-out text.
  std::vector<double> losses_after(const Outcome& outcome) const {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    std::vector<double> losses;
    const nlohmann::json figures = json();
    for (const auto& step : figures["steps"]) losses.push_back(step["loss"]);
    losses.push_back(figures["held_out"].back()["loss"]);
    return losses;
  }
  nlohmann::json json() const { return nlohmann::json::parse(std::ifstream(path("out.json"))); }
  std::string text_flags() const { return "--text " + path("text.txt") + " --length 32 "; }

  const TextScratch scratch_;
};

TEST_F(LanguageModelProgramTest, MistakesEndWithTwoAndHelpWithZero) {
  EXPECT_EQ(run("").exit_code, 2);
  EXPECT_EQ(run("--help").exit_code, 0);
  for (const std::string command : {"finetune", "lora", "pretrain", "eval", "generate", "export"}) {
    const Outcome help = run(command + " --help");
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_THAT(help.output, AllOf(HasSubstr("--model"), HasSubstr("Ranks:")));
    EXPECT_EQ(run(command + " --no-such-flag").exit_code, 2) << command;
  }
  EXPECT_THAT(run_model("finetune", "").output, HasSubstr("--text"));
  const Outcome both = run_model("finetune", text_flags() + "--chat x.jsonl");
  EXPECT_EQ(both.exit_code, 2) << both.output;
  const Outcome micro = run_model("finetune", text_flags() + "--batch 2 --micro-batch 3");
  EXPECT_EQ(micro.exit_code, 2) << micro.output;
  EXPECT_THAT(micro.output, HasSubstr("--micro-batch: more rows than --batch has"));
}

TEST_F(LanguageModelProgramTest, TrainsEvaluatesExportsAndContinues) {
  const Outcome trained =
      run_model("finetune", text_flags() + "--steps 12 --batch 4 --lr 1e-2 --out " + path("tuned"));
  ASSERT_EQ(trained.exit_code, 0) << trained.output;
  EXPECT_THAT(trained.output, AllOf(HasSubstr("step 12/12  loss"), HasSubstr("held-out loss"),
                                    HasSubstr("wrote " + path("tuned"))));
  const nlohmann::json figures = json();
  EXPECT_EQ(figures["steps"].size(), 12);
  EXPECT_LT(figures["held_out"][1]["loss"].get<double>(),
            figures["held_out"][0]["loss"].get<double>());
  EXPECT_TRUE(std::filesystem::exists(path("tuned/tokenizer.json")));

  const auto loss_of = [&](const std::string& model) {
    const Outcome outcome = run("eval --model " + model + " --text " + path("text.txt") +
                                " --threads 1 --ranks 2 --json " + path("out.json"));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return json()["loss"].get<double>();
  };
  EXPECT_LT(loss_of(path("tuned")), loss_of(scratch_.path().string()));

  const Outcome answer =
      run_model("generate", "--prompt 'hello there' --prompt 12 --tokens 5 --temperature 1");
  ASSERT_EQ(answer.exit_code, 0) << answer.output;
  EXPECT_EQ(json()["answers"].size(), 2);
  EXPECT_EQ(json()["answers"][1]["prompt"], "12");
}

TEST_F(LanguageModelProgramTest, MlpsInTilesHaveTheSameLossesInLessMemory) {
  const auto trained = [&](const std::string& flags) {
    const Outcome outcome = run_model("finetune", "--text " + path("text.txt") +
                                                      " --length 64 --held-out-share 0 --steps 3 "
                                                      "--batch 64 --micro-batch 32 --lr 1e-2 " +
                                                      flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return json();
  };
  const nlohmann::json whole = trained(""), tiled = trained("--tiled-mlp");
  ASSERT_EQ(tiled["steps"].size(), 3);
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_NEAR(tiled["steps"][step]["loss"].get<double>(),
                whole["steps"][step]["loss"].get<double>(), 1e-5);
  }
  EXPECT_LT(tiled["peak_bytes"], whole["peak_bytes"]);
}

TEST_F(LanguageModelProgramTest, InFp64TrainsToTheSameLossesAndIsReadAgain) {
  const auto losses_in = [&](const std::string& flags) {
    return losses_after(
        run_model("finetune", text_flags() + "--steps 4 --batch 4 --lr 1e-3 " + flags));
  };
  const auto floats = losses_in(""), doubles = losses_in("--dtype fp64 --out " + path("fp64"));
  ASSERT_EQ(doubles.size(), 5);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(doubles[i], floats[i], 1e-5) << i;
    EXPECT_NE(doubles[i], static_cast<double>(static_cast<float>(doubles[i]))) << "was in fp32";
  }
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("fp64/config.json")))["torch_dtype"],
            "float64");
  const std::string model = "--model " + path("fp64") + " --text " + path("text.txt") +
                            " --threads 1 --json " + path("out.json");
  const auto loss_with = [&](const std::string& flags) {
    const Outcome outcome = run("eval " + model + flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return json()["loss"].get<double>();
  };
  EXPECT_NEAR(loss_with(" --dtype fp64"), loss_with(""), 1e-5);
  const Outcome adapted = run("lora " + model +
                              " --length 32 --dtype fp64 --steps 2 --batch 2 "
                              "--rank 2 --merged " +
                              path("merged"));
  EXPECT_EQ(adapted.exit_code, 0) << adapted.output;
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("merged/config.json")))["torch_dtype"],
            "float64");
  EXPECT_THAT(run_model("finetune", text_flags() + "--dtype fp64 --states bf16").output,
              HasSubstr("but compute_dtype is Double; leave it out"));
}

TEST_F(LanguageModelProgramTest, AdaptersAreWrittenAloneAndMergedOnRequest) {
  const std::string lora = text_flags() + "--steps 4 --batch 4 --lr 1e-2 --rank 2 ";
  const Outcome trained =
      run_model("lora", lora + "--out " + path("adapters") + " --merged " + path("merged"));
  ASSERT_EQ(trained.exit_code, 0) << trained.output;
  const auto loss_of = [&](const std::string& flags) {
    const Outcome outcome = run("eval --text " + path("text.txt") + " --threads 1 --json " +
                                path("out.json") + " " + flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return json()["loss"].get<double>();
  };
  const double adapted =
      loss_of("--model " + scratch_.path().string() + " --adapters " + path("adapters"));
  EXPECT_NEAR(adapted, loss_of("--model " + path("merged")), 1e-5);
  EXPECT_GT(std::abs(adapted - loss_of("--model " + scratch_.path().string())), 1e-3);
}

TEST_F(LanguageModelProgramTest, WritesAModelOfAShapeThatIsUsedFromADisk) {
  const Outcome made = run("init --config " + path("config.json") + " --out " + path("random") +
                           " --dtype bf16 --seed 7 --file-bytes 4KiB");
  ASSERT_EQ(made.exit_code, 0) << made.output;
  EXPECT_THAT(made.output, AllOf(HasSubstr("M parameters"), HasSubstr(" files; highest")));
  std::filesystem::create_directories(path("disk"));
  const std::string model = " --model " + path("random") + " --tokenizer " +
                            path("tokenizer.json") + " --threads 1 --json " + path("out.json");
  const std::string on_disk = " --parameters-on nvme --nvme " + path("disk");
  const auto loss_with = [&](const std::string& flags) {
    const Outcome outcome = run("eval" + model + " --text " + path("text.txt") + flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return json()["loss"].get<double>();
  };
  EXPECT_NEAR(loss_with(on_disk), loss_with(""), 1e-6);
  const Outcome answer = run("generate" + model + on_disk + " --prompt hello --tokens 3");
  EXPECT_EQ(answer.exit_code, 0) << answer.output;
  const Outcome written =
      run("export" + model + on_disk + " --export-dtype bf16 --out " + path("written"));
  EXPECT_EQ(written.exit_code, 0) << written.output;
  EXPECT_TRUE(std::filesystem::exists(path("written/tokenizer.json")));
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path("written/config.json")))["torch_dtype"],
            "bfloat16");
  EXPECT_THAT(run("export" + model + " --out x --parameters-on nvme").output,
              HasSubstr("--parameters-on nvme: name a folder on a local disk with --nvme DIR"));
  EXPECT_THAT(run("export" + model + " --out x --stage 2" + on_disk).output,
              HasSubstr("keeps parameters whole on the device; use stage 3"));
  EXPECT_THAT(run_model("finetune", text_flags() + on_disk).output,
              HasSubstr("give --optimizer-on host or nvme too"));
  const Outcome trained =
      run_model("finetune", text_flags() + on_disk + " --optimizer-on nvme --steps 2 --batch 2");
  EXPECT_EQ(trained.exit_code, 0) << trained.output;
}

TEST_F(LanguageModelProgramTest, AllPromptsAreLookedAtBeforeTheFirstIsAnswered) {
  scratch_.put("prompts.txt", "hello\n\nthere\n");
  const Outcome empty = run_model("generate", "--tokens 2 --prompts " + path("prompts.txt"));
  EXPECT_EQ(empty.exit_code, 1);
  EXPECT_THAT(empty.output,
              AllOf(HasSubstr("prompts.txt:2: the prompt has no token"), Not(HasSubstr("---"))));
  const Outcome too_long =
      run_model("generate", "--tokens 2 --prompt hello --prompt '" + std::string(200, 'x') + "'");
  EXPECT_EQ(too_long.exit_code, 1);
  EXPECT_THAT(too_long.output,
              AllOf(HasSubstr("--prompt 2: the prompt has 200 tokens"), Not(HasSubstr("---"))));
}

class MixtureProgramTest : public LanguageModelProgramTest {
 protected:
  // A Mixtral of that vocabulary, with random weights.
  MixtureProgramTest() {
    language_model::ModelConfig config = small_mixtures()[0];
    config.vocabulary = static_cast<int64_t>(SmallVocabulary().tokens.size());
    config.context = 64;
    config.initial_deviation = 0.1;
    scratch_.put("mixtral.json", to_json(config, "float32").dump());
    const Outcome made = run("init --config " + path("mixtral.json") + " --out " + path("mixtral"));
    EXPECT_EQ(made.exit_code, 0) << made.output;
    scratch_.put("mixtral/tokenizer.json", SmallVocabulary().tokenizer_json().dump());
  }
  // On two ranks of one thread.
  Outcome run_mixtral(const std::string& command, const std::string& more) const {
    return run(command + " --model " + path("mixtral") + " --threads 1 --ranks 2 --json " +
               path("out.json") + " " + more);
  }
  std::vector<double> losses_of(const std::string& flags) const {
    return losses_after(
        run_mixtral("finetune", text_flags() + "--batch 4 --lr 1e-3 --warm-up 0 " + flags));
  }
};

TEST_F(MixtureProgramTest, TrainsWithItsExpertsOverRanksAndGoesOnWithThemWhole) {
  const std::vector<double> whole = losses_of("--steps 4");
  const std::string save = " --save " + path("run") + " --resume";
  const std::vector<double> spread =
      losses_of("--steps 4 --expert-parallel 2 --recompute-layers --out " + path("tuned"));
  ASSERT_EQ(spread.size(), 5);
  for (size_t i = 0; i < 5; ++i) EXPECT_NEAR(spread[i], whole[i], 1e-5) << i;
  EXPECT_EQ(json()["expert_parallel"], 2);
  // The rate's last step is the same in both parts, as it does not fall.
  const std::string level = " --least-lr 1";
  const std::vector<double> straight = losses_of("--steps 4" + level);
  losses_of("--steps 2 --expert-parallel 2" + level + save);
  const std::vector<double> rest = losses_of("--steps 4" + level + save);
  ASSERT_EQ(rest.size(), 3);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(rest[i], straight[i + 2], 1e-5) << i;

  const Outcome evaluated = run("eval --model " + path("tuned") + " --text " + path("text.txt") +
                                " --threads 1 --ranks 2");
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.output;
  const Outcome answer = run_mixtral("generate", "--prompt 'hello there' --tokens 5");
  EXPECT_EQ(answer.exit_code, 0) << answer.output;
}

TEST_F(MixtureProgramTest, HasAdaptersForAttentionAloneUnlessOthersAreAskedFor) {
  const std::string lora = text_flags() + "--steps 4 --batch 4 --lr 1e-2 --rank 2 ";
  const Outcome trained =
      run_mixtral("lora", lora + "--out " + path("adapters") + " --merged " + path("merged"));
  ASSERT_EQ(trained.exit_code, 0) << trained.output;
  EXPECT_LT(json()["held_out"].back()["loss"].get<double>(),
            json()["held_out"].front()["loss"].get<double>());
  const auto layers =
      nlohmann::json::parse(std::ifstream(path("adapters/adapter_config.json")))["target_modules"];
  EXPECT_THAT(layers, ElementsAre("k_proj", "o_proj", "q_proj", "v_proj"));
  const auto loss_of = [&](const std::string& model) {
    const Outcome outcome = run("eval --model " + model + " --text " + path("text.txt") +
                                " --threads 1 --json " + path("out.json"));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return json()["loss"].get<double>();
  };
  EXPECT_NEAR(loss_of(path("merged")), loss_of(path("mixtral") + " --adapters " + path("adapters")),
              1e-5);
}

TEST_F(MixtureProgramTest, RefusesWhatExpertsCannotBeRunWith) {
  for (const auto& [arguments, words] : std::vector<std::pair<std::string, std::string>>{
           {"finetune --expert-parallel 2 --activation-budget 1MB", "give --recompute-layers"},
           {"finetune --expert-parallel 2 --context 2", "expected one of both"},
           {"finetune --context 2", "the model has experts"},
           {"finetune --tiled-mlp", "MLPs in tiles: the model has experts"},
           {"lora --layers w1", "has no layer \"w1\""},
           {"pretrain --expert-parallel 3 --ranks 3", "4 experts, which 3 ranks"}}) {
    const Outcome outcome =
        run(arguments + " --model " + path("mixtral") + " " + text_flags() +
            "--threads 1 --as-threads" + (arguments.ends_with("--ranks 3") ? "" : " --ranks 2"));
    EXPECT_EQ(outcome.exit_code, 1) << arguments << "\n" << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(words)) << arguments;
  }
  EXPECT_EQ(run_mixtral("lora", text_flags() + "--expert-parallel 2").exit_code, 2);
  const Outcome dense = run_model("finetune", text_flags() + "--expert-parallel 2");
  EXPECT_THAT(dense.output, HasSubstr("a model of type llama has no experts"));
}

TEST_F(LanguageModelProgramTest, ASignalSavesAndTheSameCallGoesOn) {
  const std::string flags = text_flags() + "--steps 1000000 --batch 2 --report-every 1 --save " +
                            path("run") + " --resume";
  const std::string command = std::string(ZP_LM) + " finetune --model " + scratch_.path().string() +
                              " --threads 1 --ranks 2 --json " + path("out.json") + " " + flags;
  // The shell is the program then, and timeout its parent.
  const Outcome ended = shell("timeout --signal TERM 8 " + command + "; echo code $?");
  EXPECT_THAT(ended.output, HasSubstr("a signal ended the run after the save of step"));
  ASSERT_TRUE(std::filesystem::exists(path("run/latest"))) << ended.output;
  const Outcome again = shell("timeout --signal TERM 8 " + command + "; echo code $?");
  EXPECT_THAT(again.output, AllOf(HasSubstr("goes on behind step"), Not(HasSubstr("is now")),
                                  Not(HasSubstr("other options"))));
  EXPECT_EQ(json()["ended_by"], "SIGTERM");
  EXPECT_GT(json()["steps"].size(), 0);
  const Outcome refused = run_model("finetune", text_flags() + "--save " + path("run"));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.output, HasSubstr("has a state of another run"));
}

TEST_F(LanguageModelProgramTest, BadInputIsRefusedWithASentenceBeforeTheFirstStep) {
  scratch_.put("empty.txt", "");
  scratch_.put("bad.jsonl", "{\"messages\": 1}\n");
  std::filesystem::create_directories(path("bert"));
  scratch_.put("bert/config.json", R"({"model_type": "bert"})");
  for (const auto& [arguments, words] : std::vector<std::pair<std::string, std::string>>{
           {"eval --model " + path("bert") + " --text " + path("text.txt"),
            "model_type \"bert\" is not known"},
           {"eval --model " + path("nowhere") + " --text x", "is not there"},
           {"eval --model " + scratch_.path().string() + " --text " + path("empty.txt"),
            "the loss needs two or more"},
           {"eval --model " + scratch_.path().string() + " --text " + path("none.txt"),
            "none.txt: cannot be read"},
           {"generate --model " + scratch_.path().string() + " --prompt ''", "has no token"},
           {"generate --model " + scratch_.path().string() + " --prompt '" + std::string(200, 'x') +
                "'",
            "no room for an answer"},
           {"finetune --model " + scratch_.path().string() + " --text " + path("empty.txt"),
            "give more text, or shorter rows"},
           {"finetune --model " + scratch_.path().string() + " --length 65 --text " +
                path("text.txt"),
            "--length 65: the model's sequences have up to 64 tokens"},
           {"finetune --model " + scratch_.path().string() + " --chat " + path("bad.jsonl"),
            "bad.jsonl"},
           {"finetune --model " + scratch_.path().string() + " --text " + path("text.txt") +
                " --out " + scratch_.path().string(),
            "is where the model is read from"},
           {"lora --model " + scratch_.path().string() + " --text " + path("text.txt") +
                " --merged " + scratch_.path().string() + "/.",
            "is where the model is read from"},
           {"export --model " + scratch_.path().string() + " --out " + scratch_.path().string(),
            "is where the model is read from"},
           {"lora --model " + scratch_.path().string() + " --layers c_attn --text " +
                path("text.txt"),
            "has no layer \"c_attn\""}}) {
    const Outcome outcome = run(arguments + " --threads 1");
    EXPECT_EQ(outcome.exit_code, 1) << arguments << "\n" << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("zp-lm: "), HasSubstr(words))) << arguments;
    EXPECT_THAT(outcome.output, Not(HasSubstr("step 1/")));
  }
}

}  // namespace
}  // namespace zeropage::program_test
