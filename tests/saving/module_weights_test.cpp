// Weights for others and from others: exported in fp32 and under other names, and read into plain modules.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"
#include "tests/harness/small_states.h"
#include "zeropage/saved_state.h"
#include "zeropage/saving.h"

namespace zeropage::module_weights_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

class ModuleWeightsTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return disk_.path() + "/" + name; }
  std::string put_file(const std::string& name, const std::vector<SmallTensor>& tensors,
                       const SmallMetadata& metadata = {{"format", "pt"}}) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    put_bytes(path(name), safetensors_bytes(tensors, metadata));
    return path(name);
  }

  const DiskFolder disk_;
};

// Values and buffers of a plain module.
template <typename Module>
std::vector<torch::Tensor> everything(const Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : module->parameters()) all.push_back(parameter.detach().clone());
  for (const auto& buffer : module->buffers()) all.push_back(buffer.clone());
  return all;
}

// ---- out ----

Options low_precision(LowPrecisionUpdate update) {
  Options options;
  options.compute_dtype = torch::kBFloat16;
  options.low_precision_update = update;
  return options;
}

TEST_F(ModuleWeightsTest, InFp32AreTheMasterWeightsUnderAPrefix) {
  Options on_host = low_precision(LowPrecisionUpdate::kMasterWeights);
  on_host.offload.optimizer = Tier::kHost;
  for (const Options& options : {low_precision(LowPrecisionUpdate::kMasterWeights),
                                 low_precision(LowPrecisionUpdate::kSplitMasterWeights), on_host}) {
    for (const int stage : {0, 2, 3}) {
      SCOPED_TRACE(stage);
      run_ranks(2, [&](World& world) {
        DistributedDataParallel<Oddball> model(make<Oddball>(), world,
                                               Setting{stage, 2, options}.all());
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.001));
        for (int step = 0; step < 3; ++step) train_step(model, optimizer, step);
        std::map<std::string, torch::Tensor> exact;
        visit_owned_shards(model, [&](const OwnedShard& shard) {
          exact[shard.name] = shard.exact.to(torch::kFloat);
        });
        save_weights(path("export"), model, {},
                     {.weights_as = WeightsAs::kFp32, .prefix = "model."});
        const state::SavedState saved(path("export"));
        EXPECT_EQ(saved.weights().find("first.weight"), nullptr);
        const auto* const entry = saved.weights().find("model.first.weight");
        ASSERT_NE(entry, nullptr);
        EXPECT_EQ(entry->dtype, state::Dtype::kF32);
        EXPECT_EQ(saved.weights().find("model.steps")->dtype, state::Dtype::kI64);
        EXPECT_EQ(saved.weights().header().metadata.at("model.last.weight"), "model.tied");

        auto plain = make<Oddball>();
        load_weights(path("export"), plain, {.prefix = "model."});
        bool has_more_digits = false;
        for (const auto& item : plain->named_parameters()) {
          if (item.key() == "last.weight") continue;
          const auto flat = item.value().detach().as_strided({item.value().numel()}, {1});
          const OwnedShard shard = owned_shard(model, model->named_parameters()[item.key()]);
          const auto part = flat.slice(0, shard.range.begin, shard.range.end);
          EXPECT_TRUE(torch::equal(part, exact.at(item.key()))) << item.key();
          has_more_digits |= !torch::equal(part.to(torch::kBFloat16).to(torch::kFloat), part);
        }
        EXPECT_TRUE(has_more_digits) << "than bf16 has";
      });
    }
  }
}

TEST_F(ModuleWeightsTest, ThatWereExportedAreLoadedByAModelThatStripsThePrefix) {
  run_ranks(2, [&](World& world) {
    const Options options = low_precision(LowPrecisionUpdate::kMasterWeights);
    DistributedDataParallel<Oddball> model(make<Oddball>(), world, Setting{3, 2, options}.all());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.001));
    for (int step = 0; step < 3; ++step) train_step(model, optimizer, step);
    save_weights(path("export"), model, {}, {.weights_as = WeightsAs::kFp32, .prefix = "model."});
    const auto masters = [](const auto& of) {
      std::vector<torch::Tensor> all;
      visit_owned_shards(of, [&](const OwnedShard& shard) { all.push_back(shard.exact.clone()); });
      return all;
    };
    DistributedDataParallel<Oddball> other(make<Oddball>(), world, Setting{3, 2, options}.all());
    EXPECT_FALSE(same_bits(masters(other), masters(model)));
    EXPECT_THAT(error_of([&] { load_weights(path("export"), other); }),
                AllOf(HasSubstr("missing in it"), HasSubstr("unexpected: model.")));
    const LoadReport report = load_weights(path("export"), other, {.prefix = "model."});
    EXPECT_THAT(report.missing, IsEmpty());
    EXPECT_THAT(report.unexpected, IsEmpty());
    EXPECT_TRUE(same_bits(masters(other), masters(model)));
  });
}

TEST_F(ModuleWeightsTest, AWholeStateIsRefusedUnderOtherNamesOrInOtherDtypes) {
  run_ranks(2, [&](World& world) {
    DistributedDataParallel<Oddball> model(make<Oddball>(), world, Setting{1, 2}.all());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.001));
    for (const SaveOptions& options :
         {SaveOptions{.prefix = "model."}, SaveOptions{.weights_as = WeightsAs::kFp32}}) {
      EXPECT_THAT(error_of([&] { save_state(path("step-0"), model, optimizer, {}, options); }),
                  HasSubstr("SaveOptions::prefix and weights_as are save_weights()'s"));
    }
    EXPECT_FALSE(std::filesystem::exists(path("step-0")));
  });
}

// ---- in ----

TEST_F(ModuleWeightsTest, OfASavedRunGoIntoAPlainModule) {
  std::vector<torch::Tensor> trained;
  run_ranks(2, [&](World& world) {
    DistributedDataParallel<Oddball> model(make<Oddball>(), world, Setting{3, 2}.all());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) train_step(model, optimizer, step);
    save_state(path("run/step-3"), model, optimizer);
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) trained.push_back(item.value());
  });
  for (const char* name : {"run", "run/step-3", "run/step-3/weights.safetensors"}) {
    auto plain = make<Oddball>();
    const torch::Tensor weight = plain->last->weight;
    EXPECT_FALSE(same_bits(everything(plain), trained));
    const ModuleLoadReport report = load_weights(path(name), plain);
    EXPECT_THAT(report.missing, IsEmpty());
    EXPECT_TRUE(same_bits(everything(plain), trained)) << name;
    EXPECT_TRUE(plain->last->weight.is_same(weight)) << "the tensors stay";
    EXPECT_TRUE(plain->tied.is_same(weight)) << "and tied";
    EXPECT_TRUE(weight.requires_grad());
  }
  const auto shared = std::make_shared<OddballImpl>();
  load_weights(path("run"), shared);
  EXPECT_TRUE(same_bits(everything(shared), trained));
}

const SmallTensor kWeight = {"weight", {2, 3}, bytes_of_values<float>({1, 2, 3, 4, 5, 6})};
const SmallTensor kBias = {"bias", {2}, bytes_of_values<float>({7, 8})};

TEST_F(ModuleWeightsTest, ComeFromAPlainFileInTheModulesDtype) {
  const std::string file = put_file("a.safetensors", {kWeight, kBias});
  torch::nn::Linear linear(3, 2);
  load_weights(file, linear);
  EXPECT_TRUE(torch::equal(linear->weight, torch::arange(1, 7).view({2, 3}).to(torch::kFloat)));
  EXPECT_TRUE(torch::equal(linear->bias, torch::tensor({7.0F, 8.0F})));
  linear->to(torch::kBFloat16);
  load_weights(file, *linear);
  EXPECT_EQ(linear->weight.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(linear->bias, torch::tensor({7.0F, 8.0F}).to(torch::kBFloat16)));
}

TEST_F(ModuleWeightsTest, ComeFromTheFilesThatAnIndexNames) {
  put_file("hub/one.safetensors", {kWeight});
  put_file("hub/two.safetensors", {kBias});
  const std::string index = path("hub/model.safetensors.index.json");
  put_bytes(index, R"({"metadata": {"total_size": 32}, "weight_map":
                      {"weight": "one.safetensors", "bias": "two.safetensors"}})");
  torch::nn::Linear linear(3, 2);
  load_weights(index, linear);
  EXPECT_TRUE(torch::equal(linear->bias, torch::tensor({7.0F, 8.0F})));

  put_bytes(index, R"({"weight_map": {"weight": "../a.safetensors"}})");
  EXPECT_THAT(error_of([&] { load_weights(index, linear); }),
              HasSubstr("expected names of files beside it, got \"../a.safetensors\""));
  put_bytes(index, "weights");
  EXPECT_THAT(error_of([&] { load_weights(index, linear); }), HasSubstr("\"weight_map\""));
  put_file("hub/two.safetensors", {kBias, kWeight});
  put_bytes(index, R"({"weight_map": {"weight": "one.safetensors", "bias": "two.safetensors"}})");
  EXPECT_THAT(error_of([&] { load_weights(index, linear); }),
              HasSubstr("\"weight\" is in another file of the index too"));
}

TEST_F(ModuleWeightsTest, UnderOtherNamesTiedNamesAndAPrefixAreFound) {
  torch::nn::Linear linear(3, 2);
  load_weights(put_file("b.safetensors",
                        {{"net.kernel", {2, 3}, kWeight.bytes}, {"net.bias", {2}, kBias.bytes}}),
               linear, {.names = {{"weight", "kernel"}}, .prefix = "net."});
  EXPECT_EQ(linear->weight[1][2].item<float>(), 6);
  // safetensors.torch.save_model() writes tied tensors so.
  load_weights(put_file("c.safetensors",
                        {{"head", {2, 3}, bytes_of_values<float>({6, 5, 4, 3, 2, 1})}, kBias},
                        {{"weight", "head"}}),
               linear);
  EXPECT_EQ(linear->weight[1][2].item<float>(), 1);
}

TEST_F(ModuleWeightsTest, ThatDoNotFitAreRefusedWithAllNamesAndNothingChanges) {
  torch::nn::Linear linear(3, 2);
  const auto before = everything(linear);
  const std::string other = put_file(
      "other.safetensors", {{"weight", {3, 2}, kWeight.bytes}, {"scale", {2}, kBias.bytes}});
  const std::string all = error_of([&] { load_weights(other, linear); });
  EXPECT_THAT(all, AllOf(HasSubstr("other.safetensors: the weights are of another module"),
                         HasSubstr("1 missing in it: bias"), HasSubstr("1 unexpected: scale"),
                         HasSubstr("weight (expected Float [2, 3], got Float [3, 2])"),
                         HasSubstr("strict = false")));
  EXPECT_THAT(error_of([&] { load_weights(other, linear, {.strict = false}); }),
              HasSubstr("weight (expected Float [2, 3], got Float [3, 2])"))
      << "another shape is an error none the less";
  const std::string whole_numbers = put_file(
      "whole.safetensors", {{"bias", {2}, bytes_of_values<int32_t>({7, 8}), state::Dtype::kI32}});
  EXPECT_THAT(error_of([&] { load_weights(whole_numbers, linear, {.strict = false}); }),
              HasSubstr("bias (expected Float [2], got Int [2])"));
  EXPECT_TRUE(same_bits(everything(linear), before));
}

TEST_F(ModuleWeightsTest, InPartAreLoadedWhereThatIsAskedForAndTheReportSaysWhatWasNot) {
  torch::nn::Linear linear(3, 2);
  const auto before = linear->weight.detach().clone();
  const ModuleLoadReport report =
      load_weights(put_file("part.safetensors", {kBias, {"scale", {2}, kBias.bytes}}), linear,
                   {.strict = false});
  EXPECT_THAT(report.missing, ElementsAre("weight"));
  EXPECT_THAT(report.unexpected, ElementsAre("scale"));
  EXPECT_TRUE(torch::equal(linear->bias, torch::tensor({7.0F, 8.0F})));
  EXPECT_TRUE(torch::equal(linear->weight, before));
}

TEST_F(ModuleWeightsTest, OfNoFileADamagedOneOrForAModuleWithoutMemoryAreRefused) {
  torch::nn::Linear linear(3, 2);
  EXPECT_THAT(error_of([&] { load_weights(path("nothing.safetensors"), linear); }),
              HasSubstr("nothing.safetensors"));
  put_bytes(path("short.safetensors"), "short");
  EXPECT_THAT(error_of([&] { load_weights(path("short.safetensors"), linear); }),
              HasSubstr("short.safetensors"));
  DeferredModule<torch::nn::Linear> deferred([] { return torch::nn::Linear(3, 2); });
  const std::string file = put_file("d.safetensors", {kWeight, kBias});
  EXPECT_THAT(error_of([&] { load_weights(file, deferred.module()); }),
              HasSubstr("\"weight\" is on the meta device, without memory"));
}

TEST_F(ModuleWeightsTest, ADamagedBlockOfASavedRunIsFoundBeforeAnythingChanges) {
  run_ranks(1, [&](World& world) {
    DistributedDataParallel<Oddball> model(make<Oddball>(), world, Setting{1, 1}.all());
    save_weights(path("run/step-0"), model);
  });
  std::fstream stream(path("run/step-0/weights.safetensors"),
                      std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(-3, std::ios::end);
  stream.put('x');
  stream.close();
  auto plain = make<Oddball>();
  const auto before = everything(plain);
  EXPECT_THAT(error_of([&] { load_weights(path("run"), plain); }),
              HasSubstr("the file is damaged"));
  EXPECT_TRUE(same_bits(everything(plain), before));
}

TEST_F(ModuleWeightsTest, GoIntoAWrappedModuleUnderAGuardThatSaysWhere) {
  const std::string file = put_file("e.safetensors", {kWeight, kBias});
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](World& world) {
      DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 2), world,
                                                       Setting{stage, 2}.all());
      {
        const GatheredParameters guard(model, Modified::on_rank(0));
        if (world.rank() == 0) load_weights(file, model.module());
      }
      const auto out = model(torch::ones({1, 3}));
      EXPECT_TRUE(torch::equal(out, torch::tensor({{13.0F, 23.0F}}))) << stage;
    });
  }
}

}  // namespace
}  // namespace zeropage::module_weights_test
