// examples/language_model/weights: models from files into shards, and back.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/language_model/evaluate/evaluation.h"
#include "examples/language_model/weights/adapters.h"
#include "examples/language_model/weights/export.h"
#include "examples/language_model/weights/open_model.h"
#include "examples/language_model/weights/random_model.h"
#include "examples/language_model/weights/safetensors_writer.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::weights_test {
namespace {

using namespace language_model;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class LanguageModelWeightsTest : public ::testing::Test {
 protected:
  // A folder of the model as others write it: a tied head once.
  std::string put_model(const std::string& name, const LanguageModel& model) const {
    const std::string folder = path(name);
    std::filesystem::create_directories(folder);
    std::vector<SafetensorsWriter::Entry> entries;
    for (const auto& parameter : model.named_parameters()) {
      if (model.config().tied_head && parameter.key() == "lm_head.weight") continue;
      entries.push_back({parameter.key(), parameter.value().sizes().vec()});
    }
    SafetensorsWriter file(folder + "/model.safetensors", entries);
    for (const auto& entry : entries) file.write(entry.name, model.named_parameters()[entry.name]);
    file.finish();
    put_text(folder + "/config.json", to_json(model.config(), "float32").dump());
    return folder;
  }
  static void put_text(const std::string& file, const std::string& text) {
    std::ofstream(file) << text;
  }
  std::string path(const std::string& name) const { return disk_.path() + "/" + name; }

  static std::vector<int32_t> text(const ModelConfig& config, int64_t length) {
    const torch::Tensor tokens = random_tokens(config, 1, length).to(torch::kInt).contiguous();
    return {tokens.const_data_ptr<int32_t>(), tokens.const_data_ptr<int32_t>() + length};
  }

  const DiskFolder disk_;
};

Options at_stage(int stage) {
  return {.stage = stage_of(stage), .page_bytes = 4096};
}

TEST_F(LanguageModelWeightsTest, GiveTheSameLossAtEveryStageAndNumberOfRanks) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto plain = drawn(config);
    const std::string folder = put_model("model", *plain);
    const std::vector<int32_t> tokens = text(config, 57);
    double expected = 0, count = 0;
    for (int64_t begin = 0; begin + 1 < 57; begin += 15) {
      const int64_t end = std::min<int64_t>(57, begin + 16);
      const torch::Tensor ids =
          torch::tensor(std::vector<int32_t>(tokens.begin() + begin, tokens.begin() + end),
                        torch::kLong)
              .unsqueeze(0);
      plain->eval();
      expected += plain->forward(ids.slice(1, 0, -1), ids.slice(1, 1)).item<double>() *
                  static_cast<double>(end - begin - 1);
      count += static_cast<double>(end - begin - 1);
    }
    for (const int stage : {0, 1, 2, 3}) {
      for (const int ranks : {1, 2, 4}) {
        SCOPED_TRACE(::testing::Message() << "stage " << stage << ", " << ranks << " ranks");
        run_ranks(ranks, [&](World& world) {
          WrappedModel model = open_model(ModelFiles(folder), world, {.sharding = at_stage(stage)});
          const TextLoss loss = evaluate(model, tokens, /*window=*/16);
          EXPECT_EQ(loss.tokens, 56);
          EXPECT_NEAR(loss.loss, expected / count, 1e-6);
          EXPECT_NEAR(evaluate(model, tokens, 16, /*batch=*/3).loss, expected / count, 1e-6);
        });
      }
    }
  }
}

TEST_F(LanguageModelWeightsTest, AreWrittenAsTheyWereReadFromAnyShards) {
  for (const ModelConfig& config : small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto plain = drawn(config);
    const std::string folder = put_model("model", *plain);
    for (const int stage : {0, 3}) {
      run_ranks(2, [&](World& world) {
        WrappedModel model = open_model(ModelFiles(folder), world, {.sharding = at_stage(stage)});
        export_model(path("out"), model);
      });
      const ModelFiles out(path("out"));
      ModelConfig read = out.config(), before = plain->config();
      EXPECT_EQ(read, before);
      const auto again = make_model(read);
      load_weights(*out.open_weights(), *again);
      const auto expected = plain->named_parameters();
      for (const auto& parameter : again->named_parameters()) {
        EXPECT_TRUE(torch::equal(parameter.value(), expected[parameter.key()])) << parameter.key();
      }
    }
  }
}

TEST_F(LanguageModelWeightsTest, OfAnotherShapeAreRefusedWithAllNamesBeforeTheFirstStep) {
  const std::string folder = put_model("model", *drawn(small_llama()));
  ModelConfig other = small_llama();
  other.vocabulary = 41;
  other.layers = 4;
  put_text(folder + "/config.json", to_json(other, "float32").dump());
  run_ranks(2, [&](World& world) {
    EXPECT_THAT(
        error_of([&] { open_model(ModelFiles(folder), world, {.sharding = at_stage(3)}); }),
        AllOf(
            HasSubstr("9 missing in it: model.layers.3.input_layernorm.weight"),
            HasSubstr("model.embed_tokens.weight (expected Float [41, 24], got Float [40, 24])")));
    AdapterTargets adapters{.options = {}, .layers = {"q_proj"}};
    other.vocabulary = 40;
    if (world.rank() == 0) put_text(folder + "/config.json", to_json(other, "float32").dump());
    world.sum(1.0);
    EXPECT_THAT(error_of([&] {
                  open_model(ModelFiles(folder), world,
                             {.sharding = at_stage(3), .adapters = adapters});
                }),
                AllOf(HasSubstr("missing in it: model.layers.3.mlp.up_proj.weight"),
                      Not(HasSubstr("lora_A"))));
  });
}

TEST_F(LanguageModelWeightsTest, FoldersAndFilesThatAreNoModelAreRefused) {
  EXPECT_THAT(error_of([&] { ModelFiles files(path("nothing")); }), HasSubstr("is not there"));
  std::filesystem::create_directories(path("empty"));
  EXPECT_THAT(error_of([&] { ModelFiles files(path("empty")); }), HasSubstr("has no config.json"));
  put_text(path("empty/config.json"), "{");
  EXPECT_THAT(error_of([&] { ModelFiles files(path("empty")); }), HasSubstr("is no JSON"));
  put_text(path("empty/config.json"), R"({"model_type": "gpt2"})");
  EXPECT_THAT(error_of([&] { ModelFiles(path("empty")).open_weights(); }),
              HasSubstr("has neither model.safetensors nor model.safetensors.index.json"));
  put_text(path("weights.bin"), "PK");
  EXPECT_THAT(error_of([&] { ModelFiles files(path("weights.bin")); }), HasSubstr("a .gguf file"));
}

TEST_F(LanguageModelWeightsTest, OfGpt2UnderItsFirstNamesAreRead) {
  const auto plain = drawn(small_gpt2());
  const std::string folder = put_model("model", *plain);
  std::vector<SafetensorsWriter::Entry> entries;
  constexpr size_t kPrefix = sizeof("transformer.") - 1;
  for (const auto& parameter : plain->named_parameters()) {
    if (parameter.key() == "lm_head.weight") continue;
    entries.push_back({parameter.key().substr(kPrefix), parameter.value().sizes().vec()});
  }
  entries.push_back({"h.0.attn.bias", {1, 1, 32, 32}});
  SafetensorsWriter file(folder + "/model.safetensors", entries);
  for (const auto& parameter : plain->named_parameters()) {
    if (parameter.key() == "lm_head.weight") continue;
    file.write(parameter.key().substr(kPrefix), parameter.value());
  }
  file.write("h.0.attn.bias", torch::zeros({1, 1, 32, 32}));
  file.finish();
  const auto again = make_model(small_gpt2());
  load_weights(*ModelFiles(folder).open_weights(), *again);
  const torch::Tensor tokens = random_tokens(small_gpt2(), 1, 9);
  plain->eval();
  again->eval();
  EXPECT_TRUE(torch::equal(again->logits(tokens), plain->logits(tokens)));
}

TEST_F(LanguageModelWeightsTest, OnADiskGiveTheSameLossAndAreWrittenAsTheyWereRead) {
  const auto plain = drawn(small_llama());
  const std::string folder = put_model("model", *plain);
  const std::vector<int32_t> tokens = text(small_llama(), 40);
  double expected = 0;
  run_ranks(1, [&](World& world) {
    WrappedModel model = open_model(ModelFiles(folder), world, {.sharding = at_stage(0)});
    expected = evaluate(model, tokens, 16).loss;
  });
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    for (const int ranks : {1, 2}) {
      run_ranks(ranks, [&](World& world) {
        Options options = at_stage(3);
        options.offload.parameters = options.offload.optimizer = tier;
        if (tier == Tier::kNvme) options.offload.nvme_directory = disk_.path();
        WrappedModel model = open_model(ModelFiles(folder), world, {.sharding = options});
        EXPECT_NEAR(evaluate(model, tokens, 16).loss, expected, 1e-6);
        export_model(path("out"), model);
      });
      const auto again = make_model(small_llama());
      load_weights(*ModelFiles(path("out")).open_weights(), *again);
      for (const auto& parameter : again->named_parameters()) {
        EXPECT_TRUE(torch::equal(parameter.value(), plain->named_parameters()[parameter.key()]));
      }
    }
  }
}

TEST_F(LanguageModelWeightsTest, AtRandomAreAModelThatOpensInAFileOrInSeveral) {
  ModelConfig config = small_configs()[1];
  config.initial_deviation = 0.05;
  const RandomModel one = write_random_model(path("one"), config, {.seed = 3});
  const RandomModel several =
      write_random_model(path("several"), config, {.seed = 3, .file_bytes = 8192});
  EXPECT_EQ(one.files, 1);
  EXPECT_GT(several.files, 3);
  EXPECT_EQ(one.parameters, count_parameters(config));
  EXPECT_EQ(several.bytes, 4 * count_parameters(config));
  EXPECT_TRUE(std::filesystem::exists(path("several/model.safetensors.index.json")));
  EXPECT_FALSE(std::filesystem::exists(path("several/model.safetensors")));
  const auto left = make_model(config), right = make_model(config);
  load_weights(*ModelFiles(path("one")).open_weights(), *left);
  load_weights(*ModelFiles(path("several")).open_weights(), *right);
  for (const auto& parameter : left->named_parameters()) {
    const torch::Tensor& values = parameter.value();
    EXPECT_TRUE(torch::equal(values, right->named_parameters()[parameter.key()]));
    if (values.dim() > 1) {
      EXPECT_NEAR(values.std().item<double>(), 0.05, 0.01) << parameter.key();
    } else {
      const double all = parameter.key().ends_with("bias") ? 0 : 1;
      EXPECT_TRUE(torch::equal(values, torch::full_like(values, all))) << parameter.key();
    }
  }
  EXPECT_THAT(error_of([&] { write_random_model(path("several"), config); }),
              HasSubstr("the folder has a model already"));
  const RandomModel half =
      write_random_model(path("half"), small_gpt2(), {.dtype = torch::kBFloat16});
  EXPECT_EQ(half.bytes, 2 * count_parameters(small_gpt2()));
  run_ranks(2, [&](World& world) {
    WrappedModel model = open_model(ModelFiles(path("half")), world, {.sharding = at_stage(3)});
    EXPECT_NEAR(evaluate(model, text(small_gpt2(), 33), 16).loss, std::log(40), 0.1);
  });
}

// What trains in bf16 is written in fp32 as the optimizer has it.
TEST_F(LanguageModelWeightsTest, TrainedInBf16AreWrittenInFp32WithAllTheirDigits) {
  const std::string folder = put_model("model", *drawn(small_llama()));
  const torch::Tensor ids = random_tokens(small_llama(), 2, 16);
  for (const int stage : {0, 3}) {
    for (const bool has_adapters : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "stage " << stage << ", adapters " << has_adapters);
      std::map<std::string, torch::Tensor> exact;
      std::mutex mutex;
      run_ranks(2, [&](World& world) {
        OpenOptions open{.sharding = at_stage(stage)};
        open.sharding.compute_dtype = torch::kBFloat16;
        if (has_adapters)
          open.adapters = AdapterTargets{.options = {.rank = 2}, .layers = {"q_proj"}};
        WrappedModel model = open_model(ModelFiles(folder), world, open);
        Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          model(ids.slice(1, 0, -1), ids.slice(1, 1)).backward();
          optimizer.step();
        }
        visit_owned_shards(model, [&](const OwnedShard& shard) {
          const std::lock_guard lock(mutex);
          auto [at, is_new] = exact.try_emplace(shard.name);
          if (is_new) {
            at->second = torch::zeros({model.named_parameters()[shard.name].numel()});
          }
          at->second.narrow(0, shard.range.begin, shard.range.numel()).copy_(shard.exact);
        });
        if (has_adapters) {
          save_adapters(path("out"), model, folder, torch::kFloat32);
        } else {
          export_model(path("out"), model, {.dtype = torch::kFloat32});
        }
      });
      const auto source = zeropage::open_weights(
          path(has_adapters ? "out/adapter_model.safetensors" : "out/model.safetensors"));
      bool has_digits = false;
      for (const auto& entry : source->tensors()) {
        const torch::Tensor written = torch::empty({c10::multiply_integers(entry.sizes)});
        ASSERT_EQ(entry.dtype, torch::kFloat32);
        source->read(entry, 0, written);
        const std::string name =
            has_adapters ? entry.name.substr(std::string(kAdapterPrefix).size()) : entry.name;
        EXPECT_TRUE(torch::equal(written, exact.at(name))) << name;
        has_digits |= !torch::equal(written.to(torch::kBFloat16).to(torch::kFloat32), written);
      }
      EXPECT_TRUE(has_digits);
    }
  }
}

TEST_F(LanguageModelWeightsTest, WithATensorTooManyAreRefusedBesideNewAdaptersToo) {
  const auto plain = drawn(small_llama());
  const std::string folder = put_model("model", *plain);
  std::vector<SafetensorsWriter::Entry> entries;
  for (const auto& parameter : plain->named_parameters()) {
    if (parameter.key() == "lm_head.weight" || parameter.key() == "model.norm.weight") continue;
    entries.push_back({parameter.key(), parameter.value().sizes().vec()});
  }
  entries.push_back({"model.layers.0.self_attn.q_norm.weight", {8}});
  SafetensorsWriter file(folder + "/model.safetensors", entries);
  for (const auto& entry : entries) file.write(entry.name, torch::zeros(entry.sizes));
  file.finish();
  run_ranks(2, [&](World& world) {
    EXPECT_THAT(error_of([&] {
                  open_model(
                      ModelFiles(folder), world,
                      {.sharding = at_stage(3), .adapters = AdapterTargets{.layers = {"q_proj"}}});
                }),
                AllOf(HasSubstr("unexpected: model.layers.0.self_attn.q_norm.weight"),
                      HasSubstr("missing in it: model.norm.weight"), Not(HasSubstr("half loaded")),
                      Not(HasSubstr("lora"))));
  });
}

// A run that trains new adapters, saves them alone, and merges them.
TEST_F(LanguageModelWeightsTest, AdaptersSavedAloneAndMergedComputeTheSame) {
  for (const ModelConfig& config : {small_llama(), small_gpt2()}) {
    for (const int stage : {0, 3}) {
      SCOPED_TRACE(::testing::Message() << name_of(config.architecture) << ", stage " << stage);
      const std::string folder = put_model("model", *drawn(config));
      const bool is_gpt2 = config.architecture == Architecture::kGpt2;
      const AdapterTargets targets{.options = {.rank = 2, .alpha = 8},
                                   .layers = is_gpt2
                                                 ? std::vector<std::string>{"c_attn", "c_fc"}
                                                 : std::vector<std::string>{"q_proj", "down_proj"}};
      const std::vector<int32_t> tokens = text(config, 40);
      const torch::Tensor ids = random_tokens(config, 2, 16);
      run_ranks(2, [&](World& world) {
        double trained = 0;
        {
          WrappedModel model = open_model(ModelFiles(folder), world,
                                          {.sharding = at_stage(stage), .adapters = targets});
          const double before = evaluate(model, tokens, 16).loss;
          Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.02));
          std::map<std::string, torch::Tensor> first;
          visit_owned_shards(
              model, [&](const OwnedShard& shard) { first[shard.name] = shard.values.clone(); });
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            model(ids.slice(1, 0, -1), ids.slice(1, 1)).backward();
            optimizer.step();
          }
          visit_owned_shards(model, [&](const OwnedShard& shard) {
            if (shard.values.numel() == 0) return;
            EXPECT_NE(torch::equal(shard.values, first[shard.name]), is_of_adapter(shard.name))
                << shard.name;
          });
          trained = evaluate(model, tokens, 16).loss;
          EXPECT_GT(std::abs(trained - before), 1e-3);
          save_adapters(path("adapters"), model, folder);
          export_model(path("merged"), model);
        }
        WrappedModel adapted =
            open_model(ModelFiles(folder), world,
                       {.sharding = at_stage(stage), .adapters_from = path("adapters")});
        EXPECT_NEAR(evaluate(adapted, tokens, 16).loss, trained, 1e-6);
        WrappedModel merged =
            open_model(ModelFiles(path("merged")), world, {.sharding = at_stage(stage)});
        EXPECT_NEAR(evaluate(merged, tokens, 16).loss, trained, 1e-5);
      });
      const auto saved = open_weights(path("adapters/adapter_model.safetensors"));
      EXPECT_EQ(saved->tensors().front().name,
                is_gpt2 ? "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
                        : "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    }
  }
}

}  // namespace
}  // namespace zeropage::weights_test
