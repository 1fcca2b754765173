// Optimizers that read whole tensors have the same bits however their parameters are cut, kept and moved.
#include "zero/update/tensor_passes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/muon.h"
#include "zeropage/pipeline.h"
#include "zeropage/zeropage.h"

namespace zeropage::tensor_passes_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;
using memory::operator""_KiB;
using memory::operator""_MiB;

constexpr int kSteps = 3;
constexpr int64_t kTokens = 11;
constexpr int64_t kWidth = 12;
constexpr int64_t kHidden = 350;  // a weight of which is large enough for 8-bit states

torch::Tensor numbers(torch::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed));
}

torch::nn::Linear without_bias(int64_t inputs, int64_t outputs) {
  return torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(false));
}

// An embedding, a fused weight, a tall and a wide one, experts, a convolution, vectors, and a head of the embedding's sizes.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kTokens, kWidth));
    fused = register_module("fused", torch::nn::Linear(kWidth, 3 * kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, kHidden));
    down = register_module("down", torch::nn::Linear(kHidden, kWidth));
    filter = register_module(
        "filter", torch::nn::Conv1d(torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)));
    experts = register_parameter("experts", torch::empty({3, kWidth, 20}));
    rare = register_module("rare", without_bias(kWidth, kWidth));
    head = register_module("head", without_bias(kWidth, kTokens));
    const torch::NoGradGuard no_grad;
    uint64_t seed = 1;
    for (auto& parameter : parameters())
      parameter.copy_(numbers(parameter.sizes(), ++seed).mul_(0.3));
  }

  // ids: [samples, length]. Loss: a number.
  torch::Tensor forward(const torch::Tensor& ids, bool uses_rare = false) {
    torch::Tensor x = tokens(ids);
    const auto parts = fused(x).chunk(3, -1);
    x = x + parts[0] * torch::sigmoid(parts[1]) + parts[2];
    x = x + down(torch::tanh(up(x)));
    x = x + filter(x.transpose(1, 2)).transpose(1, 2);
    for (int64_t expert = 0; expert < 3; ++expert) {
      const auto weight = experts.select(0, expert);
      x = x + torch::tanh(x.matmul(weight)).matmul(weight.t());
    }
    if (uses_rare) x = x + rare(x);
    return head(x).to(torch::kFloat).log_softmax(-1).select(-1, 3).mean().neg();
  }

  torch::nn::Embedding tokens{nullptr};
  torch::nn::Linear fused{nullptr}, up{nullptr}, down{nullptr}, rare{nullptr}, head{nullptr};
  torch::nn::Conv1d filter{nullptr};
  torch::Tensor experts;
};
TORCH_MODULE(Mixed);

torch::Tensor ids_of(int step, int micro_step = 0) {
  return torch::randint(
             kTokens, {2, 6},
             at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + micro_step)))
      .to(torch::kLong);
}

template <typename O>
OptimizerParamGroup group(std::vector<torch::Tensor> parameters, const O& options) {
  return {std::move(parameters), std::make_unique<O>(options)};
}

struct OfMuon {
  using Class = Muon;
  static std::vector<OptimizerParamGroup> groups(MixedImpl& module) {
    const MuonOptions muon = MuonOptions(0.02).weight_decay(0.1);
    const MuonOptions adamw = MuonOptions::adamw(0.01);
    std::vector<OptimizerParamGroup> groups;
    groups.push_back(group({module.up->weight, module.down->weight, module.rare->weight}, muon));
    groups.push_back(group({module.fused->weight}, MuonOptions(muon).row_blocks({kWidth})));
    groups.push_back(
        group({module.experts}, MuonOptions(muon).matrices(MuonMatrices::kBatch).nesterov(false)));
    groups.push_back(group(
        {module.filter->weight},
        MuonOptions(muon).matrices(MuonMatrices::kFlattened).scale(MuonScale::kMatchRmsAdamW)));
    groups.push_back(group({module.tokens->weight, module.head->weight, module.fused->bias,
                            module.up->bias, module.down->bias, module.filter->bias},
                           adamw));
    return groups;
  }
};

struct OfLamb {
  using Class = Lamb;
  static std::vector<OptimizerParamGroup> groups(MixedImpl& module) {
    std::vector<torch::Tensor> vectors;
    std::vector<torch::Tensor> others;
    for (const auto& parameter : module.parameters()) {
      (parameter.dim() == 1 ? vectors : others).push_back(parameter);
    }
    std::vector<OptimizerParamGroup> groups;
    groups.push_back(group(others, LambOptions(0.02)));
    groups.push_back(group(vectors, LambOptions(0.01).weight_decay(0).trust_ratio(false)));
    return groups;
  }
};

struct OfAdafactor {
  using Class = Adafactor;
  static std::vector<OptimizerParamGroup> groups(MixedImpl& module) {
    std::vector<torch::Tensor> some;
    std::vector<torch::Tensor> others;
    for (const auto& parameter : module.parameters()) {
      (some.size() < 5 ? some : others).push_back(parameter);
    }
    std::vector<OptimizerParamGroup> groups;
    groups.push_back(group(some, AdafactorOptions(0.02)));
    groups.push_back(group(others, AdafactorOptions(0.01).weight_decay(0.1).d(1.5)));
    return groups;
  }
};

struct Run {
  int ranks = 1;
  int stage = 0;
  Options options = {};
  int64_t micro_steps = 1;
  int first = 0;
  int end = kSteps;
  std::string load = {};
  std::string save = {};
  // The step in which the weight `rare` gets a gradient for the first time.
  int rare_from = 1000;

  Options all() const {
    Options result = options;
    result.stage = stage_of(stage);
    if (result.page_bytes == 0) result.page_bytes = 4_KiB;
    return result;
  }
};

template <typename Recipe, typename Model>
void train(const Run& run, MixedImpl& module, Model& model) {
  Optimizer<typename Recipe::Class> optimizer(model, Recipe::groups(module));
  if (!run.load.empty()) load_state(run.load, model, optimizer);
  Accumulator accumulator(model, {.micro_steps = run.micro_steps});
  for (int step = run.first; step < run.end; ++step) {
    for (int64_t micro_step = 0; micro_step < run.micro_steps; ++micro_step) {
      accumulator.backward(
          model(ids_of(step, static_cast<int>(micro_step)), step >= run.rare_from));
    }
    accumulator.step(optimizer);
  }
  if (!run.save.empty()) save_state(run.save, model, optimizer);
}

// All ranks have the same samples.
template <typename Recipe>
std::vector<torch::Tensor> trained(const Run& run) {
  std::vector<torch::Tensor> result;
  run_ranks(run.ranks, [&](comm::World& world) {
    Mixed module;
    DistributedDataParallel<Mixed> model(module, world, run.all());
    train<Recipe>(run, *module, model);
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

template <typename A>
std::string error_with(const std::function<std::vector<OptimizerParamGroup>(MixedImpl&)>& groups,
                       const Options& options = {}) {
  std::string message;
  run_ranks(1, [&](comm::World& world) {
    Mixed module;
    DistributedDataParallel<Mixed> model(module, world, options);
    message = error_of([&] { Optimizer<A> optimizer(model, groups(*module)); });
  });
  return message;
}

template <typename Recipe>
class TensorPassesTest : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};
using Recipes = ::testing::Types<OfMuon, OfLamb, OfAdafactor>;
TYPED_TEST_SUITE(TensorPassesTest, Recipes);

TYPED_TEST(TensorPassesTest, HaveTheSameBitsAtEveryStageAndSplit) {
  const auto expected = trained<TypeParam>({});
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      for (const int64_t page_bytes : {4_KiB, 1_MiB}) {
        Options options;
        options.page_bytes = page_bytes;
        EXPECT_TRUE(same_bits(expected, trained<TypeParam>({ranks, stage, options})))
            << ranks << " ranks, stage " << stage << ", pages of " << page_bytes;
      }
    }
  }
}

TYPED_TEST(TensorPassesTest, HaveTheBitsOfTheClassItself) {
  Mixed module;
  typename TypeParam::Class optimizer(TypeParam::groups(*module));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    module(ids_of(step)).backward();
    optimizer.step();
  }
  EXPECT_TRUE(same_bits(trained<TypeParam>({2, 3}), module->parameters()));
}

TYPED_TEST(TensorPassesTest, HaveTheSameBitsInEveryTier) {
  const auto expected = trained<TypeParam>({});
  const DiskFolder folder;
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    for (const int stage : {0, 1, 2, 3}) {
      Options options;
      options.offload.optimizer = tier;
      if (stage == 3) options.offload.parameters = tier;
      if (tier == Tier::kNvme) options.offload.nvme_directory = folder.path();
      EXPECT_TRUE(same_bits(expected, trained<TypeParam>({2, stage, options})))
          << "tier " << static_cast<int>(tier) << ", stage " << stage;
    }
  }
}

TYPED_TEST(TensorPassesTest, HaveTheSameBitsInLowPrecision) {
  for (const auto update :
       {LowPrecisionUpdate::kMasterWeights, LowPrecisionUpdate::kSplitMasterWeights,
        LowPrecisionUpdate::kStochasticRounding}) {
    SCOPED_TRACE(static_cast<int>(update));
    Options options;
    options.compute_dtype = torch::kBFloat16;
    options.low_precision_update = update;
    const auto expected = trained<TypeParam>({1, 0, options});
    for (const int stage : {1, 3}) {
      EXPECT_TRUE(same_bits(expected, trained<TypeParam>({2, stage, options}))) << stage;
    }
  }
}

TYPED_TEST(TensorPassesTest, HaveTheSameBitsWithSmallStates) {
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
    SCOPED_TRACE(static_cast<int>(format));
    Options options;
    options.optimizer_state = format;
    if constexpr (std::is_same_v<TypeParam, OfAdafactor>) {
      EXPECT_THAT(error_with<Adafactor>(&OfAdafactor::groups, options),
                  HasSubstr("options.optimizer_state: Adafactor keeps its moments in fp32"));
      continue;
    }
    const auto expected = trained<TypeParam>({1, 0, options});
    for (const int stage : {0, 2, 3}) {
      EXPECT_TRUE(same_bits(expected, trained<TypeParam>({4, stage, options}))) << stage;
    }
  }
}

// Once a step, whatever the micro-steps.
TYPED_TEST(TensorPassesTest, HaveTheSameBitsWhereGradientsAccumulate) {
  const auto expected = trained<TypeParam>({.micro_steps = 4});
  for (const int stage : {0, 1, 2, 3}) {
    EXPECT_TRUE(
        same_bits(expected, trained<TypeParam>({.ranks = 2, .stage = stage, .micro_steps = 4})))
        << stage;
  }
}

TYPED_TEST(TensorPassesTest, LeaveAParameterWithoutAGradientAlone) {
  const auto expected = trained<TypeParam>({.rare_from = 1});
  for (const int stage : {0, 1, 3}) {
    EXPECT_TRUE(
        same_bits(expected, trained<TypeParam>({.ranks = 2, .stage = stage, .rare_from = 1})))
        << stage;
  }
  Mixed untrained;
  const auto never = trained<TypeParam>({.ranks = 2, .stage = 3});
  size_t index = 0;
  for (const auto& named : untrained->named_parameters()) {
    EXPECT_EQ(torch::equal(named.value(), never[index++]), named.key() == "rare.weight")
        << named.key();
  }
}

TYPED_TEST(TensorPassesTest, GoOnElsewhereWithTheSameBits) {
  const auto expected = trained<TypeParam>({.end = 4});
  const DiskFolder folder;
  const std::string path = folder.path() + "/state";
  trained<TypeParam>({.ranks = 4, .stage = 3, .end = 2, .save = path});
  EXPECT_TRUE(same_bits(
      expected, trained<TypeParam>({.ranks = 2, .stage = 1, .first = 2, .end = 4, .load = path})));
  EXPECT_TRUE(same_bits(
      expected, trained<TypeParam>({.ranks = 1, .stage = 0, .first = 2, .end = 4, .load = path})));
}

TYPED_TEST(TensorPassesTest, HaveTheSameBitsWhereGroupsOfRanksHaveShards) {
  Options options;
  options.shard_within = 2;
  EXPECT_TRUE(same_bits(trained<TypeParam>({}), trained<TypeParam>({4, 3, options})));
}

// What DeepSpeed did otherwise, each in silence: its issues 8441, 8443, 8438 and 8463.
class MuonAsNobodyElseHasItTest : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  // By the class itself, with the means of micro-steps.
  static std::vector<torch::Tensor> by_the_class(int64_t micro_steps) {
    Mixed module;
    Muon optimizer(OfMuon::groups(*module));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      for (int64_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
        const auto loss = module(ids_of(step, static_cast<int>(micro_step)));
        (loss / static_cast<double>(micro_steps)).backward();
      }
      optimizer.step();
    }
    return module->parameters();
  }

  static void expect_close(const std::vector<torch::Tensor>& expected,
                           const std::vector<torch::Tensor>& actual) {
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t index = 0; index < expected.size(); ++index) {
      EXPECT_TRUE(torch::allclose(expected[index], actual[index], 1e-5, 1e-6)) << index;
    }
  }
};

TEST_F(MuonAsNobodyElseHasItTest, ItIsMuonAtStage0Too) {
  EXPECT_TRUE(same_bits(by_the_class(1), trained<OfMuon>({.ranks = 2, .stage = 0})));
}

TEST_F(MuonAsNobodyElseHasItTest, AStepIsOrthogonalisedOnceWhateverTheMicroSteps) {
  for (const int stage : {0, 3}) {
    expect_close(by_the_class(4), trained<OfMuon>({.ranks = 2, .stage = stage, .micro_steps = 4}));
  }
}

TEST_F(MuonAsNobodyElseHasItTest, ItIsMuonForAModelThatWasConstructedWithoutMemory) {
  const auto construct = [] {
    torch::nn::Sequential layers;
    for (int layer = 0; layer < 3; ++layer) layers->push_back(without_bias(24, 24));
    return layers;
  };
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool defers : {false, true}) {
    run_ranks(2, [&](comm::World& world) {
      Options options;
      options.stage = stage_of(3);
      const auto step = [&](auto&& module) {
        DistributedDataParallel<torch::nn::Sequential> model(std::move(module), world, options);
        Optimizer<Muon> optimizer(model, MuonOptions(0.02));
        for (int count = 0; count < kSteps; ++count) {
          optimizer.zero_grad();
          model(torch::ones({2, 24})).square().sum().backward();
          optimizer.step();
        }
        const auto state = full_state(model);
        if (world.rank() != 0) return;
        auto& result = results.emplace_back();
        for (const auto& item : state) result.push_back(item.value());
      };
      static std::mutex mutex;
      std::unique_lock lock(mutex);
      torch::manual_seed(5);
      if (defers) {
        DeferredModule<torch::nn::Sequential> deferred(construct);
        lock.unlock();
        step(std::move(deferred));
      } else {
        auto module = construct();
        lock.unlock();
        step(std::move(module));
      }
    });
  }
  ASSERT_EQ(results.size(), 2U);
  EXPECT_TRUE(same_bits(results[0], results[1]));
}

TEST_F(MuonAsNobodyElseHasItTest, OffloadedItHasTheSameBits) {
  Options options;
  options.offload.optimizer = Tier::kHost;
  EXPECT_TRUE(same_bits(by_the_class(1), trained<OfMuon>({2, 3, options})));
}

std::string muon_error(const std::function<torch::Tensor(MixedImpl&)>& parameter,
                       const MuonOptions& options = {}) {
  return error_with<Muon>([&](MixedImpl& module) {
    std::vector<OptimizerParamGroup> groups;
    groups.push_back(group({parameter(module)}, options));
    return groups;
  });
}

TEST(MuonParametersTest, ThatAreNoMatricesAreRefusedWithTheLineToWrite) {
  const std::string vector = muon_error([](MixedImpl& module) { return module.up->bias; });
  EXPECT_THAT(vector, HasSubstr("parameter \"up.bias\" of sizes [350]"));
  EXPECT_THAT(vector, HasSubstr("muon_groups(module, MuonOptions(lr))"));
  const std::string experts = muon_error([](MixedImpl& module) { return module.experts; });
  EXPECT_THAT(experts, HasSubstr("MuonOptions(lr).matrices(MuonMatrices::kBatch)"));
  const std::string flat = muon_error([](MixedImpl& module) { return module.up->weight; },
                                      MuonOptions().matrices(MuonMatrices::kBatch));
  EXPECT_THAT(flat, HasSubstr("leave the option out"));
}

TEST(MuonParametersTest, EmbeddingsAndHeadsAreRefusedUnlessTheyAreAskedFor) {
  for (const bool of_head : {false, true}) {
    const auto parameter = [&](MixedImpl& module) {
      return of_head ? module.head->weight : module.tokens->weight;
    };
    const std::string error = muon_error(parameter);
    EXPECT_THAT(error, HasSubstr(of_head ? "\"head.weight\"" : "\"tokens.weight\""));
    EXPECT_THAT(error, HasSubstr("takes_embeddings(true)"));
    EXPECT_EQ(muon_error(parameter, MuonOptions().takes_embeddings(true)), "");
  }
}

TEST(MuonParametersTest, RowsThatBlocksDoNotMakeAreRefused) {
  EXPECT_THAT(muon_error([](MixedImpl& module) { return module.up->weight; },
                         MuonOptions().row_blocks({12})),
              HasSubstr("row_blocks: expected blocks that make 350 rows, got [12]"));
}

TEST(MuonParametersTest, OptionsThatWereEditedAreCheckedAgain) {
  const std::vector<std::pair<std::function<void(MuonOptions&)>, std::string>> edits = {
      {[](MuonOptions& of) {
         of.row_blocks({7, 8});
       },
       "row_blocks: expected blocks"},
      {[](MuonOptions& of) { of.row_blocks({100}); }, "row_blocks: expected blocks"},
      {[](MuonOptions& of) { of.matrices(MuonMatrices::kBatch); }, "leave the option out"}};
  for (const auto& [edit, words] : edits) {
    run_ranks(2, [&](comm::World& world) {
      Mixed module;
      DistributedDataParallel<Mixed> model(module, world);
      Optimizer<Muon> optimizer(model, muon_groups(*module, MuonOptions(0.02)));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        model(ids_of(step)).backward();
        if (step == 1) edit(static_cast<MuonOptions&>(optimizer.param_groups()[0].options()));
        const std::string error = error_of([&] { optimizer.step(); });
        EXPECT_THAT(error, HasSubstr(step == 0 ? "" : words));
        EXPECT_EQ(error.empty(), step == 0);
      }
    });
  }
}

TEST(MuonParametersTest, OptionsOfAnotherClassAreRefused) {
  const std::string error = error_with<Muon>([](MixedImpl& module) {
    std::vector<OptimizerParamGroup> groups;
    groups.push_back(group({module.up->weight}, torch::optim::AdamWOptions(0.1)));
    return groups;
  });
  EXPECT_THAT(error, HasSubstr("parameter group 0 has torch::optim::AdamWOptions"));
}

// The embedding is on the first stage.
TEST(MuonParametersTest, AHeadOnAnotherStageOfAPipelineIsNoMatrix) {
  const auto construct = [] {
    return torch::nn::Sequential(torch::nn::Embedding(11, 8), without_bias(8, 8),
                                 without_bias(8, 11));
  };
  for (const bool knows_all : {false, true}) {
    run_ranks(2, [&](comm::World& world) {
      const comm::Mesh mesh(world, {{"pipeline", 2}, {"data", 1}});
      const auto stage = pipeline_stage<torch::nn::Sequential>(
          construct, [](torch::nn::Sequential& all) { return layers_of(all); }, mesh["pipeline"]);
      Pipeline::Model model(stage, mesh, Options{});
      const auto groups = knows_all
                              ? muon_groups(*construct(), model.parameters(), MuonOptions(0.02))
                              : muon_groups(*stage, MuonOptions(0.02));
      const std::string error = error_of([&] { Optimizer<Muon> optimizer(model, groups); });
      if (knows_all) {
        EXPECT_EQ(error, "");
      } else if (world.rank() == 1) {
        EXPECT_THAT(error, HasSubstr("a head of an embedding's sizes"));
      }
    });
  }
}

TEST(MuonParametersTest, GroupsWithBatchesHaveSingleMatricesToo) {
  Mixed module;
  const auto groups = muon_groups(*module, MuonOptions(0.02).matrices(MuonMatrices::kBatch));
  ASSERT_EQ(groups.size(), 3U);
  EXPECT_EQ(groups[0].params().size(), 4U);  // fused, up, down, rare
  EXPECT_EQ(groups[1].params().size(), 1U);  // the experts, and not the convolution
  EXPECT_EQ(error_with<Muon>([](MixedImpl& of) {
              return muon_groups(of, MuonOptions(0.02).matrices(MuonMatrices::kBatch));
            }),
            "");
}

TEST(MuonParametersTest, GroupsOfAModuleAreWhatItTakes) {
  Mixed module;
  const auto groups = muon_groups(*module, MuonOptions(0.02));
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].params().size(), 4U);  // fused, up, down, rare
  EXPECT_EQ(groups[1].params().size(), 8U);
  EXPECT_EQ(static_cast<const MuonOptions&>(groups[1].options()).rule(), MuonRule::kAdamW);
  EXPECT_EQ(error_with<Muon>([](MixedImpl& of) { return muon_groups(of, MuonOptions(0.02)); }), "");
}

TEST(TensorPassesOptionsTest, TheClassByItselfIsRefusedOnAPart) {
  Options options;
  options.update_by = UpdateBy::kClass;
  EXPECT_THAT(error_with<Lamb>(&OfLamb::groups, options), HasSubstr("reads whole tensors"));
}

TEST(TensorPassesOptionsTest, AStepInBackwardIsRefused) {
  Options options;
  options.offload.optimizer = Tier::kHost;
  options.offload.step = StepWhen::kInBackward;
  EXPECT_THAT(error_with<Muon>(&OfMuon::groups, options), HasSubstr("use StepWhen::kInStep"));
}

TEST(TensorPassesOptionsTest, AnotherRuleOfAGroupIsRefused) {
  run_ranks(1, [](comm::World& world) {
    Mixed module;
    DistributedDataParallel<Mixed> model(module, world);
    Optimizer<Muon> optimizer(model, OfMuon::groups(*module));
    model(ids_of(0)).backward();
    static_cast<MuonOptions&>(optimizer.param_groups()[0].options()).rule(MuonRule::kAdamW);
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                HasSubstr("parameter group 0 has another rule"));
  });
}

// (N - 1) / N of each matrix goes to its owner, and as much comes back.
TEST(TensorPassesTrafficTest, IsTheFormula) {
  struct SquareImpl : torch::nn::Module {
    SquareImpl() {
      for (int layer = 0; layer < 4; ++layer) {
        layers.push_back(register_module(std::to_string(layer), without_bias(64, 64)));
      }
    }
    torch::Tensor forward(torch::Tensor x) {
      for (auto& layer : layers) x = torch::tanh(layer(x));
      return x.sum();
    }
    std::vector<torch::nn::Linear> layers;
  };
  for (const int stage : {1, 3}) {
    run_ranks(4, [&](comm::World& world) {
      Options options;
      options.stage = stage_of(stage);
      options.page_bytes = 16_KiB;  // a matrix each, of which each rank has a quarter
      DistributedDataParallel<torch::nn::ModuleHolder<SquareImpl>> model(
          torch::nn::ModuleHolder<SquareImpl>(std::make_shared<SquareImpl>()), world, options);
      Optimizer<Muon> optimizer(model);
      model(torch::ones({2, 64})).backward();
      const auto before = world.communicator().wire_traffic().pair.bytes;
      optimizer.step();
      const at::Tensor sent =
          torch::tensor({world.communicator().wire_traffic().pair.bytes - before});
      world.communicator().all_reduce(sent, comm::ReduceOp::kSum, "the bytes of a test").wait();
      EXPECT_EQ(sent.item<int64_t>(), 2 * 3 * (4 * 64 * 64 * 4) / 4);
    });
  }
}

TEST(MatrixOwnersTest, ShareTheWorkOfA24LayerModelOver64Ranks) {
  std::vector<zero::PageOfMatrices> pages;
  for (int layer = 0; layer < 24; ++layer) {
    for (const double n : {6144.0, 2048.0, 8192.0, 8192.0}) {
      const double m = 2048;
      pages.push_back({.numel = static_cast<int64_t>(m * n),
                       .matrices = {{.parameter = pages.size(), .cost = m * m * (3 * n + m)}}});
    }
  }
  const auto buckets = zero::matrix_buckets(pages, 64);
  std::vector<double> loads(64);
  double all = 0;
  for (const zero::MatrixBucket& bucket : buckets) {
    for (const zero::OwnedMatrix& matrix : bucket.matrices) {
      loads[static_cast<size_t>(matrix.owner)] += matrix.cost;
      all += matrix.cost;
    }
  }
  const double worst = *std::max_element(loads.begin(), loads.end()) / (all / 64);
  RecordProperty("worst_of_mean", std::to_string(worst));
  // 96 matrices: some of the ranks have two.
  EXPECT_LT(worst, 1.34);
}

TEST(MatrixOwnersTest, ABucketIsClosedWhenItIsFull) {
  const zero::OwnedMatrix matrix{.cost = 1};
  const auto buckets =
      zero::matrix_buckets({{100, {matrix}}, {}, {200, {matrix, matrix}}, {100, {matrix}}}, 2, 100);
  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_EQ(buckets[0].end_page, 3U);
  EXPECT_EQ(buckets[1].first_page, 3U);
  EXPECT_EQ(buckets[1].end_page, 4U);
}

}  // namespace
}  // namespace zeropage::tensor_passes_test
