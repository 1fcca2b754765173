// The byte plan is what ranks hold, by the ledger, and the formula is the plan of pages without padding.
#include "zero/plan/byte_plan.h"

#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/ledger.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::byte_plan_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Tier;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int64_t kStatesOfAdamW = 2;

// Parameters end where slots begin, so the states of neighbours have nothing between them. [batch, 64]
// -> [batch, 64]
struct ThreeLayersImpl : torch::nn::Module {
  ThreeLayersImpl() {
    first = register_module("first", torch::nn::Linear(64, 96));
    frozen = register_module("frozen", torch::nn::Linear(96, 96));
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    last = register_module("last", torch::nn::Linear(96, 64));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(frozen(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, frozen{nullptr}, last{nullptr};
};
TORCH_MODULE(ThreeLayers);

struct Way {
  std::string name;
  Options options;
};

Way precision(const std::string& name, LowPrecisionUpdate update,
              StateFormat states = StateFormat::kFp32) {
  Way way{name, {}};
  way.options.compute_dtype = torch::kBFloat16;
  way.options.low_precision_update = update;
  way.options.optimizer_state = states;
  return way;
}

Way offloaded(const std::string& name, Tier optimizer, Tier parameters, const DiskFolder& folder) {
  Way way{name, {}};
  way.options.offload.optimizer = optimizer;
  way.options.offload.parameters = parameters;
  if (optimizer == Tier::kNvme) way.options.offload.nvme_directory = folder.path();
  return way;
}

// All that changes bytes, but for the stage.
std::vector<Way> ways(const DiskFolder& folder, const Stage& stage) {
  std::vector<Way> ways = {
      {"fp32", {}},
      precision("master weights", LowPrecisionUpdate::kMasterWeights),
      precision("split, 8 bits", LowPrecisionUpdate::kSplitMasterWeights, StateFormat::k8Bit),
      precision("stochastic, bf16", LowPrecisionUpdate::kStochasticRounding, StateFormat::kBf16),
      precision("nearest", LowPrecisionUpdate::kNearest),
      offloaded("optimizer on the host", Tier::kHost, Tier::kDevice, folder),
      offloaded("optimizer on NVMe", Tier::kNvme, Tier::kDevice, folder)};
  Way compact = precision("gradients in bf16", LowPrecisionUpdate::kMasterWeights);
  compact.options.accumulate_dtype = torch::kBFloat16;
  compact.options.reduce_dtype = torch::kFloat;
  ways.push_back(compact);
  if (stage == Stage::kParameters) {
    ways.push_back(offloaded("all on the host", Tier::kHost, Tier::kHost, folder));
    ways.push_back(offloaded("all on NVMe", Tier::kNvme, Tier::kNvme, folder));
  }
  const size_t plain = ways.size();
  for (size_t index = 0; index < plain; ++index) {
    Way& way = ways[index];
    way.options.stage = stage;
    way.options.page_bytes = 16_KiB;
    if (way.options.offload.optimizer == Tier::kDevice || way.options.compute_dtype) continue;
    Way low = way;
    low.name += ", bf16";
    low.options.compute_dtype = torch::kBFloat16;
    ways.push_back(low);
  }
  return ways;
}

std::vector<Stage> stages() {
  return {Stage::kReplicated, Stage::kOptimizerState, Stage::kGradients, Stage::kParameters,
          Stage{.optimizer_state = true, .parameters = true}};
}

void train_step(DistributedDataParallel<ThreeLayers>& model, torch::optim::Optimizer& optimizer,
                const Options& options) {
  const auto samples = torch::ones({2, 64}, options.compute_dtype.value_or(torch::kFloat));
  optimizer.zero_grad();
  model(samples).square().mean().backward();
  optimizer.step();
}

void expect_bytes(const memory::TierBytes& planned) {
  const memory::Ledger& ledger = *memory::Ledger::current();
  const memory::Breakdown now = ledger.now();
  for (const Kind kind :
       {Kind::kParameter, Kind::kGradient, Kind::kOptimizerState, Kind::kMasterWeights}) {
    EXPECT_EQ(now[kind], planned[Tier::kDevice][kind]) << memory::name(kind) << " on the device";
    for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
      EXPECT_EQ(ledger.offloaded(tier)[kind], planned[tier][kind])
          << memory::name(kind) << " in tier " << memory::name(tier);
    }
  }
}

// After a step, and once its gradients are zeroed.
void expect_planned(const DistributedDataParallel<ThreeLayers>& model,
                    torch::optim::Optimizer& optimizer) {
  const zero::BytePlan& plan = sharded_parameters_of(model).pages->plan();
  expect_bytes(plan.held_with_gradients(kStatesOfAdamW));
  optimizer.zero_grad();
  SCOPED_TRACE("zeroed");
  expect_bytes(plan.held(kStatesOfAdamW));
}

class BytePlanTest : public ::testing::TestWithParam<int> {};

TEST_P(BytePlanTest, IsWhatARankHoldsByTheLedger) {
  const DiskFolder folder;
  for (const Stage& stage : stages()) {
    for (const Way& way : ways(folder, stage)) {
      SCOPED_TRACE("stage " + text_of(stage) + ", " + way.name);
      run_ranks(GetParam(), [&](comm::World& world) {
        DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, way.options);
        Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
        train_step(model, optimizer, way.options);
        expect_planned(model, optimizer);
      });
    }
  }
}

TEST_P(BytePlanTest, FollowsParametersThatAreUnfrozen) {
  for (const Way& way : {precision("", LowPrecisionUpdate::kMasterWeights),
                         precision("", LowPrecisionUpdate::kSplitMasterWeights)}) {
    run_ranks(GetParam(), [&](comm::World& world) {
      auto module = make<ThreeLayers>();
      DistributedDataParallel<ThreeLayers> model(module, world, way.options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
      train_step(model, optimizer, way.options);
      const int64_t before =
          sharded_parameters_of(model).pages->plan().held(0)[Tier::kDevice].total();
      for (auto& parameter : module->frozen->parameters()) parameter.requires_grad_(true);
      train_step(model, optimizer, way.options);
      expect_planned(model, optimizer);
      EXPECT_GT(sharded_parameters_of(model).pages->plan().held(0)[Tier::kDevice].total(), before);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, BytePlanTest, ::testing::Values(1, 3));

zero::PageLayout page_of(int64_t numel, int world_size, c10::ScalarType dtype = c10::kFloat) {
  return zero::lay_out_pages({{.name = "weight", .numel = numel, .dtype = dtype}},
                             {.world_size = world_size, .page_bytes = 1})
      .front();
}

TEST(BytePlanFormulaTest, IsThePlanOfAPageWithoutPadding) {
  const DiskFolder folder;
  for (const int ranks : {1, 4}) {
    const int64_t numel = 3 * ranks * zero::kShardBlockNumel * 16;
    for (const Stage& stage : stages()) {
      for (const Way& way : ways(folder, stage)) {
        SCOPED_TRACE("stage " + text_of(stage) + ", " + way.name);
        const zero::PageLayout page =
            page_of(numel, ranks, way.options.compute_dtype.value_or(c10::kFloat));
        const zero::BytePlan plan({page}, way.options, zero::PlaceOfRank{ranks - 1, ranks});
        const memory::TierBytes formula =
            zero::formula_bytes(way.options, numel, ranks, kStatesOfAdamW);
        for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
          EXPECT_EQ(memory::to_text(plan.held(kStatesOfAdamW)[tier]),
                    memory::to_text(formula[tier]));
        }
        EXPECT_EQ(plan.gradient_bytes(), zero::formula_gradient_bytes(way.options, numel, ranks));
      }
    }
  }
}

TEST(BytePlanFormulaTest, IsZerosOfFp32AndAdam) {
  constexpr int64_t kParameters = 1'000'000;
  constexpr int kRanks = 8;
  const std::vector<std::pair<Stage, int64_t>> expected = {
      {Stage::kReplicated, 16 * kParameters},
      {Stage::kOptimizerState, 8 * kParameters + 8 * kParameters / kRanks},
      {Stage::kGradients, 4 * kParameters + 12 * kParameters / kRanks},
      {Stage::kParameters, 16 * kParameters / kRanks}};
  for (const auto& [stage, bytes] : expected) {
    const memory::TierBytes held =
        zero::formula_bytes({.stage = stage}, kParameters, kRanks, kStatesOfAdamW);
    EXPECT_EQ(held[Tier::kDevice].persistent() +
                  zero::formula_gradient_bytes({.stage = stage}, kParameters, kRanks),
              bytes)
        << "stage " << text_of(stage);
  }
}

// 4 bytes each for a value, its gradient and its two states; what the optimizer updates away from fp32
// parameters that stay is a copy.
TEST(BytePlanFormulaTest, HasWhatLeavesInItsTier) {
  constexpr int64_t kParameters = 1'000'000;
  constexpr int kRanks = 8;
  constexpr int64_t kShare = kParameters / kRanks;
  struct Case {
    Stage stage;
    Tier optimizer;
    Tier parameters;
    int64_t device, host, nvme;
  };
  for (const Case& expected : std::vector<Case>{
           {Stage::kReplicated, Tier::kHost, Tier::kDevice, 8 * kParameters, 16 * kParameters, 0},
           {Stage::kOptimizerState, Tier::kHost, Tier::kDevice, 8 * kParameters, 16 * kShare, 0},
           {Stage::kGradients, Tier::kHost, Tier::kDevice, 4 * kParameters, 16 * kShare, 0},
           {Stage::kParameters, Tier::kHost, Tier::kDevice, 4 * kShare, 16 * kShare, 0},
           {Stage::kParameters, Tier::kHost, Tier::kHost, 0, 16 * kShare, 0},
           {Stage::kGradients, Tier::kNvme, Tier::kDevice, 4 * kParameters, 4 * kShare,
            12 * kShare},
           {Stage::kParameters, Tier::kNvme, Tier::kHost, 0, 8 * kShare, 8 * kShare},
           {Stage::kParameters, Tier::kNvme, Tier::kNvme, 0, 4 * kShare, 12 * kShare}}) {
    Options options{.stage = expected.stage};
    options.offload.optimizer = expected.optimizer;
    options.offload.parameters = expected.parameters;
    const memory::TierBytes formula =
        zero::formula_bytes(options, kParameters, kRanks, kStatesOfAdamW);
    SCOPED_TRACE(c10::str("stage ", text_of(expected.stage), ", optimizer in tier ",
                          memory::name(expected.optimizer), ", parameters in tier ",
                          memory::name(expected.parameters)));
    EXPECT_EQ(
        formula[Tier::kDevice].total() + zero::formula_gradient_bytes(options, kParameters, kRanks),
        expected.device);
    EXPECT_EQ(formula[Tier::kHost].total(), expected.host);
    EXPECT_EQ(formula[Tier::kNvme].total(), expected.nvme);
  }
}

TEST(BytePlanPagesTest, SayHowRanksShareThem) {
  const zero::PageLayout large = page_of(64 * zero::kShardBlockNumel, 2);
  const zero::PageLayout small = page_of(zero::kShardBlockNumel, 2);
  const auto plan = [&](const Stage& stage) {
    Options options{.stage = stage};
    if (stage.parameters) options.minimum_sharded_bytes = 64 * zero::kShardBlockNumel;
    return zero::BytePlan({large, small}, options, zero::PlaceOfRank{.rank = 1, .ranks = 2});
  };
  const auto expect_shared = [](const zero::PagePlan& page, zero::Sharing parameters,
                                zero::Sharing gradients) {
    EXPECT_EQ(page.parameters, parameters);
    EXPECT_EQ(page.gradients, gradients);
  };
  expect_shared(plan(Stage::kReplicated)[0], zero::Sharing::kReplicated,
                zero::Sharing::kReplicated);
  expect_shared(plan(Stage::kOptimizerState)[0], zero::Sharing::kOwned, zero::Sharing::kOwned);
  expect_shared(plan(Stage::kGradients)[0], zero::Sharing::kOwned, zero::Sharing::kSharded);
  expect_shared(plan(Stage::kParameters)[0], zero::Sharing::kSharded, zero::Sharing::kSharded);
  expect_shared(plan(Stage::kParameters)[1], zero::Sharing::kOwned, zero::Sharing::kSharded);
  expect_shared(plan({.optimizer_state = true, .parameters = true})[0], zero::Sharing::kSharded,
                zero::Sharing::kOwned);
  EXPECT_EQ(plan(Stage::kReplicated)[0].owned, (Range{0, large.padded_numel(2)}));
  EXPECT_EQ(plan(Stage::kOptimizerState)[0].owned, large.shard(1));
}

TEST(BytePlanPagesTest, LeaveFromTheModulesEndAsFarAsTheyFit) {
  const std::vector<zero::PageLayout> pages(3, page_of(8 * zero::kShardBlockNumel, 2));
  Options options{.stage = Stage::kGradients};
  options.offload.optimizer = Tier::kHost;
  const auto bytes = [&] {
    const zero::BytePlan plan(pages, options, zero::PlaceOfRank{.rank = 0, .ranks = 2});
    return plan.held(kStatesOfAdamW)[Tier::kHost].total();
  };
  const int64_t all = bytes();
  options.offload.optimizer_bytes = all * 2 / 3;
  EXPECT_EQ(bytes(), all * 2 / 3);
  const zero::BytePlan plan(pages, options, zero::PlaceOfRank{.rank = 0, .ranks = 2});
  EXPECT_EQ(plan[0].optimizer_tier, Tier::kDevice);
  EXPECT_EQ(plan[1].optimizer_tier, Tier::kHost);
  options.offload.optimizer_bytes -= 1;
  EXPECT_EQ(bytes(), all / 3);
}

TEST(BytePlanPagesTest, HaveStatesForTheirParametersAndNoneForPadding) {
  constexpr int kRanks = 4;
  const zero::PageLayout page = page_of(3 * zero::kShardBlockNumel + 7, kRanks);
  ASSERT_GT(page.padded_numel(kRanks), page.numel);
  int64_t bytes = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    bytes +=
        zero::BytePlan({page}, {.stage = Stage::kGradients}, zero::PlaceOfRank{rank, kRanks})[0]
            .state_bytes;
  }
  EXPECT_EQ(bytes, page.numel * static_cast<int64_t>(sizeof(float)));
}

TEST(BytePlanTransientTest, IsTwoLargestPagesOrTheBudgetAndABucket) {
  const auto plan = [](const Options& options, int ranks) {
    return zero::BytePlan(
        {page_of(64 * zero::kShardBlockNumel, ranks), page_of(zero::kShardBlockNumel, ranks)},
        options, zero::PlaceOfRank{.rank = 0, .ranks = ranks});
  };
  Options options{.stage = Stage::kParameters};
  const zero::BytePlan sharded = plan(options, 2);
  const zero::PagePlan& largest = sharded[0];
  EXPECT_EQ(sharded.transient_bytes(), 2 * largest.whole_bytes + largest.bucket_bytes);
  options.parameter_budget_bytes = largest.whole_bytes + 1;
  EXPECT_EQ(plan(options, 2).transient_bytes(),
            options.parameter_budget_bytes + largest.bucket_bytes);
  // On one rank a page is its shard.
  EXPECT_EQ(plan(options, 1).transient_bytes(), plan(options, 1)[0].bucket_bytes);
  EXPECT_EQ(plan({.stage = Stage::kOptimizerState}, 2).transient_bytes(), 0);
  Options low{.stage = Stage::kOptimizerState};
  low.reduce_dtype = c10::kBFloat16;
  EXPECT_EQ(plan(low, 2).transient_bytes(), largest.whole_bytes / 2) << "a copy in what travels";
}

}  // namespace
}  // namespace zeropage::byte_plan_test
