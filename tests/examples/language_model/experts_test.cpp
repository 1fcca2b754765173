// examples/language_model with experts: beside transformers, from files and back, and spread over ranks.
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "examples/language_model/evaluate/evaluation.h"
#include "examples/language_model/train/trainer.h"
#include "examples/language_model/weights/expert_names.h"
#include "examples/language_model/weights/export.h"
#include "examples/language_model/weights/open_model.h"
#include "examples/language_model/weights/random_model.h"
#include "examples/language_model/weights/safetensors_writer.h"
#include "tests/examples/language_model/expert_goldens.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::experts_test {
namespace {

using namespace language_model;
using namespace zeropage::testing;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

json goldens() {
  std::string text;
  for (const char* piece : kExpertGoldens) text += piece;
  return json::parse(text);
}

// The formula of make_expert_goldens.py.
torch::Tensor values_of(const std::string& name, const std::vector<int64_t>& sizes) {
  int64_t seed = 0;
  for (size_t i = 0; i < name.size(); ++i) seed += static_cast<int64_t>(i + 1) * name[i];
  seed %= 7919;
  const torch::Tensor i = torch::arange(c10::multiply_integers(sizes), torch::kLong);
  torch::Tensor drawn = (i * 7919 + i * i * 31 + seed * 104729).remainder(2003);
  drawn = drawn.to(torch::kDouble) / 2003 - 0.5;
  const double scale = name.find(".gate.") != std::string::npos ? 1.6 : 0.8;
  const double shift = name.ends_with("norm.weight") ? 1 : 0;
  return (drawn * scale + shift).to(torch::kFloat).view(sizes);
}

using Tensors = std::map<std::string, torch::Tensor>;

Tensors tensors_of(const json& sizes) {
  Tensors tensors;
  for (const auto& [name, of] : sizes.items()) tensors[name] = values_of(name, of);
  return tensors;
}

Tensors read_all(const std::string& file) {
  Tensors tensors;
  const auto source = zeropage::open_weights(file);
  for (const auto& entry : source->tensors()) {
    const torch::Tensor flat = torch::empty({c10::multiply_integers(entry.sizes)}, entry.dtype);
    source->read(entry, 0, flat);
    tensors[entry.name] = flat.view(entry.sizes);
  }
  return tensors;
}

void expect_equal(const Tensors& left, const Tensors& right) {
  ASSERT_EQ(left.size(), right.size());
  for (const auto& [name, values] : left) {
    ASSERT_TRUE(right.contains(name)) << name;
    EXPECT_TRUE(torch::equal(values, right.at(name))) << name;
  }
}

class LanguageModelExpertsTest : public ::testing::Test {
 protected:
  std::string put(const std::string& name, const Tensors& tensors, const json& config) const {
    const std::string folder = path(name);
    std::filesystem::create_directories(folder);
    std::vector<SafetensorsWriter::Entry> entries;
    for (const auto& [of, values] : tensors) {
      entries.push_back({of, values.sizes().vec(), values.scalar_type()});
    }
    SafetensorsWriter file(folder + "/model.safetensors", entries);
    for (const auto& [of, values] : tensors) file.write(of, values);
    file.finish();
    std::ofstream(folder + "/config.json") << config.dump();
    return folder;
  }
  std::string random(const ModelConfig& of, const std::string& name) const {
    ModelConfig config = of;
    config.initial_deviation = 0.2;
    write_random_model(path(name), config, {.seed = 3});
    return path(name);
  }
  std::string path(const std::string& name) const { return disk_.path() + "/" + name; }

  const DiskFolder disk_;
};

Options at_stage(int stage) {
  return {.stage = stage_of(stage), .page_bytes = 4096};
}

// Logits, losses and gradients, read by their own names, and written again.
TEST_F(LanguageModelExpertsTest, ComputeWhatTransformersDoes) {
  const json all = goldens();
  const auto rows = all["tokens"].get<std::vector<std::vector<int64_t>>>();
  const torch::Tensor tokens = torch::stack({torch::tensor(rows[0]), torch::tensor(rows[1])});
  torch::Tensor targets = torch::full_like(tokens, kIgnored);
  targets.slice(1, 0, -1).copy_(tokens.slice(1, 1));
  for (const auto& [kind, golden] : all["models"].items()) {
    SCOPED_TRACE(kind);
    const Tensors tensors = tensors_of(golden["sizes"]);
    const std::string folder = put(kind, tensors, golden["config"]);
    const auto wanted = golden["logits"].get<std::vector<float>>();
    for (const int stage : {0, 3}) {
      run_ranks(2, [&](World& world) {
        WrappedModel model = open_model(ModelFiles(folder), world, {.sharding = at_stage(stage)});
        model.eval();
        {
          const torch::NoGradGuard no_grad;
          const torch::Tensor last = model->logits(tokens).select(1, -1).reshape({-1});
          EXPECT_LT((last - torch::tensor(wanted)).abs().max().item<double>(), 1e-5);
          const torch::Tensor loss = model(tokens, targets);
          EXPECT_NEAR(loss.item<double>(), golden["loss"].get<double>(), 1e-5);
        }
        model.train();
        const torch::Tensor loss = model(tokens, targets);
        EXPECT_NEAR(loss.item<double>(), golden["trained_loss"].get<double>(), 1e-5);
        loss.backward();
        const GatheredGradients gathered(model);
        for (const auto& [name, norm] : golden["gradient_norms"].items()) {
          // Names of transformers' modules, whose experts are stacked too.
          std::string ours = name;
          const auto replace = [&](const std::string& from, const std::string& to) {
            const size_t at = ours.find(from);
            if (at != std::string::npos) ours.replace(at, from.size(), to);
          };
          if (kind == "mixtral") replace(".mlp.", ".block_sparse_moe.");
          replace(".gate.weight", ".experts.router");
          replace(".experts.down_proj", ".experts.w_down");
          const torch::Tensor gradient = model.named_parameters()[ours].grad();
          ASSERT_TRUE(gradient.defined()) << ours;
          EXPECT_NEAR(gradient.norm().item<double>(), norm.get<double>(),
                      1e-5 * std::max(1.0, norm.get<double>()))
              << ours;
        }
      });
    }
  }
}

TEST_F(LanguageModelExpertsTest, AreWrittenAsTheyWereReadOnAnyRanks) {
  const json all = goldens();
  for (const auto& [kind, golden] : all["models"].items()) {
    SCOPED_TRACE(kind);
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      Tensors tensors = tensors_of(golden["sizes"]);
      for (auto& [name, values] : tensors) values = values.to(dtype);
      const std::string folder = put("model", tensors, golden["config"]);
      for (const auto& [ranks, expert_parallel] :
           std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {2, 2}, {4, 2}}) {
        for (const int stage : {0, 3}) {
          run_ranks(ranks, [&](World& world) {
            Options sharding = at_stage(stage);
            if (dtype != torch::kFloat) sharding.compute_dtype = dtype;
            WrappedModel model =
                open_model(ModelFiles(folder), world,
                           {.sharding = sharding, .expert_parallel = expert_parallel});
            export_model(path("out"), model);
          });
          expect_equal(read_all(path("out/model.safetensors")), tensors);
          EXPECT_EQ(read_config(path("out/config.json")), read_config(folder + "/config.json"));
        }
      }
    }
  }
}

struct Way {
  int ranks = 1;
  int expert_parallel = 1;
  int stage = 3;
  bool recomputes = false;
  bool is_pretraining = false;
};

struct Trained {
  std::vector<double> losses, norms;
  Tensors weights;
};

class LanguageModelExpertsTrainingTest : public LanguageModelExpertsTest {
 protected:
  // folder: of the model, whose shape alone counts for pretraining.
  Trained train(const std::string& folder, const Way& run) const {
    Trained trained;
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 200; ++i) tokens.push_back((i * 7 + i * i) % 40);
    run_ranks(run.ranks, [&](World& world) {
      const OpenOptions open{.sharding = at_stage(run.stage),
                             .expert_parallel = run.expert_parallel};
      const ModelFiles files(folder);
      WrappedModel model = run.is_pretraining ? new_model(files.config(), 1, world, open)
                                              : open_model(files, world, open);
      if (run.recomputes) model->recompute(zeropage::EveryBlocks::each());
      const PackedRows rows(TokenText::of(tokens), /*length=*/16, std::nullopt);
      const TrainingOptions options{
          .steps = 4, .batch = 4, .learning_rate = 1e-3, .warm_up = 0, .clip_norm = 0.5};
      std::vector<double> losses, norms;
      Trainer trainer(model, rows, options, {.step = [&](const TrainedStep& step) {
                        losses.push_back(step.loss);
                        norms.push_back(step.norm);
                      }});
      EXPECT_EQ(trainer.run(), 0);
      losses.push_back(evaluate(model, rows).loss);
      export_model(path("trained"), model);
      if (world.rank() != 0) return;
      trained.losses = losses;
      trained.norms = norms;
    });
    trained.weights = read_all(path("trained/model.safetensors"));
    return trained;
  }
  static void expect_near(const Trained& left, const Trained& right) {
    ASSERT_EQ(left.losses.size(), right.losses.size());
    for (size_t i = 0; i < left.losses.size(); ++i) {
      EXPECT_NEAR(left.losses[i], right.losses[i], 1e-5) << i;
    }
    for (size_t i = 0; i < left.norms.size(); ++i) {
      EXPECT_NEAR(left.norms[i], right.norms[i], 1e-4 * right.norms[i]) << i;
    }
    // AdamW makes a whole step of a gradient that is nearly 0, so the order of a sum shows there. A step is up to 1e-3.
    for (const auto& [name, values] : left.weights) {
      const torch::Tensor difference = (values - right.weights.at(name)).abs();
      EXPECT_LT(difference.max().item<double>(), 1e-3) << name;
      EXPECT_LT(difference.mean().item<double>(), 1e-5) << name;
    }
  }
};

TEST_F(LanguageModelExpertsTrainingTest, IsThatOfOneRankWhereverExpertsAre) {
  for (const ModelConfig& config : small_mixtures()) {
    const std::string folder = random(config, std::string("start-") + name_of(config.architecture));
    for (const bool is_pretraining : {false, true}) {
      const Trained alone = train(folder, {.stage = 0, .is_pretraining = is_pretraining});
      EXPECT_LT(alone.losses.back(), alone.losses.front());
      for (const Way& run : {Way{.ranks = 2}, Way{.ranks = 2, .expert_parallel = 2},
                             Way{.ranks = 4, .expert_parallel = 2, .recomputes = true},
                             Way{.ranks = 4, .expert_parallel = 4, .stage = 1},
                             Way{.ranks = 4, .expert_parallel = 2, .stage = 0}}) {
        SCOPED_TRACE(::testing::Message()
                     << name_of(config.architecture) << ", " << run.ranks << " ranks, experts over "
                     << run.expert_parallel << ", stage " << run.stage << ", pretraining "
                     << is_pretraining);
        Way same = run;
        same.is_pretraining = is_pretraining;
        expect_near(train(folder, same), alone);
      }
    }
  }
}

// The loss that is trained on has what evens out the choices, and the one that is measured has not.
TEST_F(LanguageModelExpertsTrainingTest, AddsTheConfigsLossOfBalance) {
  ModelConfig config = small_mixtures()[0];
  const std::string with = random(config, "with");
  config.experts->balance_loss = 0;
  const std::string without = random(config, "without");
  const Trained left = train(with, {.ranks = 2, .expert_parallel = 2});
  const Trained right = train(without, {.ranks = 2, .expert_parallel = 2});
  // At least factor * active, where choices are even.
  EXPECT_GT(left.losses[0] - right.losses[0], 0.19);
  EXPECT_LT(left.losses[0] - right.losses[0], 0.5);
  EXPECT_NEAR(left.losses.back(), right.losses.back(), 0.05);
}

TEST_F(LanguageModelExpertsTest, TrainedInBf16AreWrittenInFp32WithAllTheirDigits) {
  const std::string folder = random(small_mixtures()[1], "model");
  const torch::Tensor ids = random_tokens(small_mixtures()[1], 2, 16);
  for (const int stage : {0, 3}) {
    run_ranks(4, [&](World& world) {
      Options sharding = at_stage(stage);
      sharding.compute_dtype = torch::kBFloat16;
      WrappedModel model =
          open_model(ModelFiles(folder), world, {.sharding = sharding, .expert_parallel = 2});
      Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        model(ids.slice(1, 0, -1), ids.slice(1, 1)).backward();
        optimizer.step();
      }
      export_model(path("exact"), model, {.dtype = torch::kFloat32});
      export_model(path("rounded"), model);
    });
    bool has_digits = false;
    const Tensors rounded = read_all(path("rounded/model.safetensors"));
    for (const auto& [name, exact] : read_all(path("exact/model.safetensors"))) {
      EXPECT_TRUE(torch::equal(exact.to(torch::kBFloat16), rounded.at(name))) << name;
      has_digits |= name.find(".experts.3.") != std::string::npos &&
                    !torch::equal(exact, rounded.at(name).to(torch::kFloat));
    }
    EXPECT_TRUE(has_digits);
  }
}

TEST_F(LanguageModelExpertsTest, ThatAreNotThoseOfTheConfigAreRefusedByName) {
  const json golden = goldens()["models"]["mixtral"];
  const auto error_with = [&](const std::function<void(Tensors&, json&)>& change) {
    Tensors tensors = tensors_of(golden["sizes"]);
    json config = golden["config"];
    change(tensors, config);
    const std::string folder = put("model", tensors, config);
    return error_of([&] {
      run_ranks(2, [&](World& world) {
        open_model(ModelFiles(folder), world, {.sharding = at_stage(3), .expert_parallel = 2});
      });
    });
  };
  const std::string prefix = "model.layers.1.block_sparse_moe.experts.";
  EXPECT_THAT(error_with([&](Tensors& tensors, json&) { tensors.erase(prefix + "2.w3.weight"); }),
              HasSubstr("missing in it: " + prefix + "2.w3.weight"));
  EXPECT_THAT(error_with([&](Tensors& tensors, json&) {
                tensors[prefix + "0.w2.weight"] = torch::zeros({20, 16});
              }),
              HasSubstr(prefix + "0.w2.weight: expected sizes [16, 20], got [20, 16]"));
  EXPECT_THAT(error_with([&](Tensors& tensors, json&) {
                tensors[prefix + "1.w1.weight"] =
                    tensors[prefix + "1.w1.weight"].to(torch::kBFloat16);
              }),
              HasSubstr(prefix + "1.w1.weight: is of another dtype"));
  EXPECT_THAT(error_with([&](Tensors& tensors, json&) {
                tensors[prefix + "4.w1.weight"] = torch::zeros({20, 16});
              }),
              HasSubstr(prefix + "4.w1.weight"));
}

TEST_F(LanguageModelExpertsTest, AreNotSpreadWhereThatCouldNotBeRight) {
  const ModelConfig mixtral = small_mixtures()[0];
  const auto error_of_ranks = [&](int ranks, const ModelConfig& config, const OpenOptions& open) {
    return error_of(
        [&] { run_ranks(ranks, [&](World& world) { new_model(config, 1, world, open); }); });
  };
  EXPECT_THAT(error_of_ranks(3, mixtral, {.expert_parallel = 3}),
              HasSubstr("4 experts, which 3 ranks along \"expert\" do not divide"));
  EXPECT_THAT(error_of_ranks(3, mixtral, {.expert_parallel = 2}),
              HasSubstr("do not divide the world's 3"));
  EXPECT_THAT(error_of_ranks(2, small_llama(), {.expert_parallel = 2}),
              HasSubstr("a model of type llama has no experts"));
  EXPECT_THAT(error_of_ranks(2, mixtral, {.context = 2}), HasSubstr("the model has experts"));
  EXPECT_THAT(error_of_ranks(2, mixtral, {.context = 2, .expert_parallel = 2}),
              HasSubstr("expected one of both"));
  const AdapterTargets attention{.layers = {"q_proj"}};
  EXPECT_THAT(error_of_ranks(2, mixtral, {.adapters = attention, .expert_parallel = 2}),
              HasSubstr("adapters are not supported beside them"));
  EXPECT_EQ(error_of_ranks(2, mixtral, {.adapters = attention}), "");
  const AdapterTargets shared{.layers = {"gate_proj"}};
  EXPECT_THAT(error_of_ranks(1, small_mixtures()[1], {.adapters = shared}),
              HasSubstr("for attention alone"));
  EXPECT_THAT(error_of_ranks(1, mixtral, {.adapters = AdapterTargets{.layers = {"w1"}}}),
              HasSubstr("no layer \"w1\""));
}

}  // namespace
}  // namespace zeropage::experts_test
