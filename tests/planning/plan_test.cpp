#include "zeropage/plan.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::plan_test {
namespace {

using namespace memory;
using ::testing::HasSubstr;
using ::testing::Not;

torch::nn::Sequential make_layers() {
  torch::nn::Sequential layers;
  for (int layer = 0; layer < 4; ++layer) {
    layers->push_back(torch::nn::Linear(256, 256));
    layers->push_back(torch::nn::GELU());
  }
  return layers;
}

constexpr int64_t kParameters = 4 * (256 * 256 + 256);

Plan plan_layers(const WorldDescription& world, const PlanOptions& options = {}) {
  return plan(make_layers, torch::zeros({32, 256}), world, options);
}

struct Asked {
  int stage = 0;
  Tier optimizer = Tier::kDevice;
  Tier parameters = Tier::kDevice;
  CheckpointPolicy checkpointing = CheckpointPolicy::kNone;
};

const Forecast& find(const Plan& plan, const Asked& asked) {
  for (const Forecast& forecast : plan.forecasts) {
    const PlannedSetting& setting = forecast.setting;
    if (setting.stage == stage_of(asked.stage) && setting.optimizer == asked.optimizer &&
        setting.parameters == asked.parameters && setting.checkpointing == asked.checkpointing) {
      return forecast;
    }
  }
  ZP_THROW("the plan has no such setting");
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return message_of(error);
  }
  return "took it";
}

TEST(PlanTest, TriesEveryStageOffloadAndPolicy) {
  const Plan plan = plan_layers({.ranks = 4});
  EXPECT_EQ(plan.parameters, kParameters);
  // Three tiers of the optimizer; at stage 3 parameters leave too, or not. No blocks are told.
  EXPECT_EQ(plan.forecasts.size(), (3 * 3 + 5) * 2U);
  EXPECT_EQ(plan.choice(), &plan.forecasts.front());
  EXPECT_EQ(plan.next_best(), &plan.forecasts[1]);
}

// The module's parameters fill whole shards.
TEST(PlanTest, HoldsTheFormulasBytesFromStepToStep) {
  const Plan plan = plan_layers({.ranks = 4});
  const auto held = [&](const Asked& asked) {
    return find(plan, asked).held[Tier::kDevice].persistent();
  };
  EXPECT_EQ(held({.stage = 0}), 12 * kParameters);
  EXPECT_EQ(held({.stage = 1}), 4 * kParameters + 8 * kParameters / 4);
  EXPECT_EQ(held({.stage = 2}), 4 * kParameters + 8 * kParameters / 4);
  EXPECT_EQ(held({.stage = 3}), 12 * kParameters / 4);
}

TEST(PlanTest, MovesStatesAndParametersToTheTiers) {
  const Plan plan = plan_layers({.ranks = 4});
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    const Forecast& away = find(plan, {.stage = 3, .optimizer = tier, .parameters = tier});
    EXPECT_EQ(away.at_peak[tier][Kind::kOptimizerState], 8 * kParameters / 4);
    EXPECT_EQ(away.at_peak[tier][Kind::kParameter], 4 * kParameters / 4);
    EXPECT_EQ(away.at_peak[Tier::kHost][Kind::kGradient], 4 * kParameters / 4);
    EXPECT_EQ(away.at_peak[Tier::kDevice][Kind::kOptimizerState], 0);
    EXPECT_EQ(away.at_peak[tier].persistent(), away.held[tier].persistent());
  }
}

TEST(PlanTest, CountsTheFlopsOfAStep) {
  const Plan plan = plan_layers({.ranks = 2}, {.micro_steps = 3});
  const double forward = 4 * 2.0 * 32 * 256 * 256;
  EXPECT_EQ(find(plan, {.stage = 0}).flops, 3 * 3 * forward);
  EXPECT_EQ(find(plan, {.stage = 3}).flops, 3 * 3 * forward);
}

TEST(PlanTest, KnowsWhenMicroStepsAreReducedAndWhatThatHoldsAndSends) {
  // A page a layer.
  const auto forced = [](ReduceMicroSteps reduce) {
    PlanOptions options{.micro_steps = 8, .reduce = reduce};
    options.training.page_bytes = 64_KiB;
    return plan_layers({.ranks = 4}, options);
  };
  const Plan by_default = forced(ReduceMicroSteps::kAuto);
  const Plan each = forced(ReduceMicroSteps::kEach);
  const Plan once = forced(ReduceMicroSteps::kOnce);
  for (const int stage : {0, 1, 2, 3}) {
    const Forecast& of_default = find(by_default, {.stage = stage});
    const Forecast& as = find(stage < 2 ? once : each, {.stage = stage});
    EXPECT_EQ(of_default.sent.total().bytes, as.sent.total().bytes);
    EXPECT_EQ(of_default.at_peak[Tier::kDevice].total(), as.at_peak[Tier::kDevice].total());
    ASSERT_TRUE(of_default.reduction.has_value());
    EXPECT_EQ(of_default.reduction->when, as.reduction->when);
    EXPECT_LT(find(once, {.stage = stage}).sent.total().bytes,
              find(each, {.stage = stage}).sent.total().bytes);
  }
  EXPECT_LT(find(once, {.stage = 1}).at_peak[Tier::kDevice].total(),
            find(each, {.stage = 1}).at_peak[Tier::kDevice].total());
  EXPECT_GT(find(once, {.stage = 2}).at_peak[Tier::kDevice].total(),
            find(each, {.stage = 2}).at_peak[Tier::kDevice].total())
      << "whole gradients";
  const Plan within = plan_layers(
      {.ranks = 4}, {.micro_steps = 8, .gradient_budget_bytes = 4 * kParameters, .stages = {2}});
  EXPECT_EQ(find(within, {.stage = 2}).reduction->when, ReduceMicroSteps::kOnce);
  EXPECT_THAT(by_default.to_string(), HasSubstr("gradients of 8 micro-batches are reduced once a "
                                                "step: each rank has whole gradients"));
  EXPECT_THAT(plan_layers({.ranks = 4}, {.micro_steps = 8, .stages = {2}}).to_string(),
              HasSubstr("are reduced at each micro-step: gradients are sharded at this stage"));
  EXPECT_THAT(plan_layers({.ranks = 4}).to_string(), Not(HasSubstr("are reduced")));
}

TEST(PlanTest, ChoosesTheCheapestThatFits) {
  // Each layer a page, so that buffers for NVMe are less than what they serve.
  PlanOptions options;
  options.training.page_bytes = 64_KiB;
  // To the byte.
  const DeviceAllocator tensors_alone{.segments = AllocatorSegments::kNone};
  const Plan all = plan_layers({.ranks = 4, .allocator = tensors_alone}, options);
  const int64_t least_here = [&] {
    int64_t least = find(all, {.stage = 3}).at_peak[Tier::kDevice].total();
    for (const Forecast& forecast : all.forecasts) {
      if (forecast.setting.optimizer != Tier::kDevice) continue;
      least = std::min(least, forecast.at_peak[Tier::kDevice].total());
    }
    return least;
  }();
  const Plan tight = plan_layers(
      {.ranks = 4, .device_memory_bytes = least_here, .allocator = tensors_alone}, options);
  ASSERT_NE(tight.choice(), nullptr);
  EXPECT_EQ(tight.choice()->setting.optimizer, Tier::kDevice);
  EXPECT_EQ(tight.choice()->at_peak[Tier::kDevice].total(), least_here);
  ASSERT_NE(tight.next_best(), nullptr);
  EXPECT_EQ(tight.next_best()->setting.optimizer, Tier::kHost);

  const Plan tighter = plan_layers(
      {.ranks = 4, .device_memory_bytes = least_here - 1, .allocator = tensors_alone}, options);
  ASSERT_NE(tighter.choice(), nullptr);
  EXPECT_EQ(tighter.choice()->setting.optimizer, Tier::kHost);
  // A host is shared by its ranks.
  const int64_t on_host = tighter.choice()->at_peak[Tier::kHost].total();
  const Plan small_host = plan_layers({.ranks = 4,
                                       .ranks_per_host = 2,
                                       .device_memory_bytes = least_here - 1,
                                       .host_memory_bytes = 2 * on_host - 2,
                                       .allocator = tensors_alone},
                                      options);
  ASSERT_NE(small_host.choice(), nullptr);
  EXPECT_NE(small_host.choice()->setting.optimizer, Tier::kHost);
}

// The layers' tensors have a few MiB, and a device's allocator takes 2 and 20 at a time.
TEST(PlanTest, TellsWhatTheDevicesAllocatorReserves) {
  const Plan tensors_alone =
      plan_layers({.ranks = 1, .allocator = {.segments = AllocatorSegments::kNone}});
  EXPECT_EQ(find(tensors_alone, {.stage = 0}).reserved_bytes, 0);
  EXPECT_EQ(find(plan_layers({.ranks = 1, .device_is_host = true}), {.stage = 0}).reserved_bytes,
            0);
  for (const AllocatorSegments segments :
       {AllocatorSegments::kExpandable, AllocatorSegments::kFixed}) {
    const Plan plan = plan_layers({.ranks = 1, .allocator = {.segments = segments}});
    for (const Forecast& forecast : plan.forecasts) {
      SCOPED_TRACE(to_string(forecast.setting));
      EXPECT_GE(forecast.reserved_bytes, forecast.at_peak[Tier::kDevice].total());
      EXPECT_EQ(forecast.reserved_bytes % 2_MiB, 0);
      EXPECT_EQ(forecast.used_bytes(plan.world, Tier::kDevice), forecast.reserved_bytes);
    }
  }
}

TEST(PlanTest, CountsWhatIsReservedBelowALimit) {
  const Forecast without = find(plan_layers({.ranks = 1}), {.stage = 0});
  const auto below = [](int64_t limit_bytes) {
    return find(plan_layers({.ranks = 1, .device_memory_bytes = limit_bytes}), {.stage = 0});
  };
  EXPECT_TRUE(below(without.reserved_bytes).fits());
  const Forecast tight = below(without.at_peak[Tier::kDevice].total());
  EXPECT_FALSE(tight.fits());
  EXPECT_GT(tight.missing_bytes[0], 0);
}

TEST(PlanTest, CountsTheWorkspacesOfMatrixProducts) {
  const auto with = [](const ProductWorkspaces& workspaces) {
    return find(plan_layers({.ranks = 1, .allocator = {.workspaces = workspaces}}), {.stage = 0});
  };
  const Forecast without = with({});
  const Forecast on_sm90 = with(kWorkspacesOfSm90);
  // Two threads have a workspace each.
  EXPECT_EQ(on_sm90.at_peak[Tier::kDevice].total() - without.at_peak[Tier::kDevice].total(),
            66_MiB);
  // Up to what was free in the last 20 MiB that each of them grew by.
  EXPECT_GE(on_sm90.reserved_bytes - without.reserved_bytes, 66_MiB - 20_MiB);
  EXPECT_EQ(on_sm90.held[Tier::kDevice].total(), without.held[Tier::kDevice].total());
}

TEST(PlanTest, SaysByHowMuchNothingFits) {
  const Plan plan =
      plan_layers({.ranks = 2, .device_memory_bytes = 64_KiB, .host_memory_bytes = 1_KiB});
  EXPECT_EQ(plan.choice(), nullptr);
  EXPECT_EQ(plan.next_best(), nullptr);
  EXPECT_GT(plan.nearest().missing_bytes[0], 0);
  const std::string text = plan.to_string();
  EXPECT_THAT(text, HasSubstr("\nnothing fits; nearest: stage "));
  EXPECT_THAT(text, HasSubstr(" of device missing"));
  EXPECT_THAT(text, HasSubstr("use more ranks, a smaller batch or a lower precision"));
}

TEST(PlanTest, SaysWhatLimitsTheChoice) {
  const std::string text = plan_layers({.ranks = 2, .device_memory_bytes = 1_GiB}).to_string();
  EXPECT_THAT(text, HasSubstr("263168 parameters on 2 ranks, 2 a host"));
  EXPECT_THAT(text, HasSubstr("\nchoice: stage "));
  EXPECT_THAT(text, HasSubstr("limited by device memory: "));
  EXPECT_THAT(text, HasSubstr(" of 1.00 GiB a rank are reserved for "));
  EXPECT_THAT(text, HasSubstr(" of tensors, of them "));
  EXPECT_THAT(text, HasSubstr("\nnext best: "));
}

// The host's figures are those of NVMe, moved, unless it is asked for alone.
TEST(PlanTest, TellsOfTheHostWhatATrialOfItTells) {
  const Plan all = plan_layers({.ranks = 2});
  const Plan host = plan_layers({.ranks = 2}, {.tiers = {Tier::kHost}});
  EXPECT_EQ(host.forecasts.size(), (3 + 2) * 2U);
  for (const Forecast& forecast : host.forecasts) {
    const Forecast& moved = find(all, {.stage = std::stoi(text_of(forecast.setting.stage)),
                                       .optimizer = Tier::kHost,
                                       .parameters = forecast.setting.parameters,
                                       .checkpointing = forecast.setting.checkpointing});
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      EXPECT_EQ(moved.at_peak[tier].bytes, forecast.at_peak[tier].bytes)
          << to_string(forecast.setting) << " " << name(tier);
      EXPECT_EQ(moved.held[tier].bytes, forecast.held[tier].bytes);
    }
  }
}

TEST(PlanTest, PlansOptimizersThatCannotLeaveOnTheDevice) {
  const auto plan_rms = [](const std::vector<Tier>& tiers) {
    const ModelToPlan<torch::nn::Sequential> model{
        .construct = make_layers,
        .loss =
            [](auto& wrapped) {
              return wrapped(torch::empty({4, 256}, torch::kMeta)).mean();
            },
        .checkpoint_blocks = {},
        .optimizer =
            [](auto& wrapped) {
              return std::make_unique<Optimizer<torch::optim::RMSprop>>(wrapped);
            }};
    return plan(model, {.ranks = 4}, {.tiers = tiers});
  };
  EXPECT_EQ(plan_rms({Tier::kDevice}).forecasts.size(), 4 * 2U);
  EXPECT_THAT(refusal([&] {
                plan_rms({Tier::kDevice, Tier::kHost});
              }),
              HasSubstr("has no fused form"));
  EXPECT_THAT(refusal([&] { plan_rms({}); }), HasSubstr("expected one tier or more, got none"));
}

TEST(PlanTest, PlansGroupsThatShardWithinAndCountsWhatBothSend) {
  PlanOptions options;
  options.training.shard_within = 2;
  const Plan plan = plan_layers({.ranks = 8, .ranks_per_host = 2}, options);
  EXPECT_EQ(plan.forecasts.size(), (2 * 3 + 5) * 2U);
  EXPECT_EQ(find(plan, {.stage = 3}).held[Tier::kDevice].persistent(), 12 * kParameters / 2);
  EXPECT_GT(find(plan, {.stage = 3}).sent.between_hosts.bytes, 0);
}

// Its attention asks whether query and key are equal, and has dropout.
TEST(PlanTest, PlansLibTorchsTransformerEncoder) {
  using namespace torch::nn;
  const auto make = [] {
    const auto layer = TransformerEncoderLayerOptions(32, 4).dim_feedforward(64);
    return TransformerEncoder(TransformerEncoderOptions(layer, 2));
  };
  const Plan plan = zeropage::plan(make, torch::zeros({8, 2, 32}), {.ranks = 4});
  int64_t parameters = 0;
  for (const auto& parameter : make()->parameters()) parameters += parameter.numel();
  EXPECT_EQ(plan.parameters, parameters);
  EXPECT_GT(find(plan, {.stage = 3}).at_peak[Tier::kDevice].activations(), 0);
  EXPECT_GT(find(plan, {.stage = 0}).flops, 0);
}

TEST(PlanTest, LeavesTheRandomGeneratorAlone) {
  torch::manual_seed(7);
  const torch::Tensor expected = torch::rand({4});
  torch::manual_seed(7);
  plan_layers({.ranks = 2});
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST(PlanTest, RefusesWorldsThatMakeNoSense) {
  EXPECT_THAT(refusal([] { plan_layers({.ranks = 0}); }),
              HasSubstr("WorldDescription::ranks: expected 1 to 4096, got 0"));
  EXPECT_THAT(refusal([] { plan_layers({.ranks = 5000}); }), HasSubstr("got 5000"));
  EXPECT_THAT(refusal([] { plan_layers({.ranks = 2, .ranks_per_host = 0}); }),
              HasSubstr("ranks_per_host: expected 1 or more"));
  EXPECT_THAT(refusal([] { plan_layers({.ranks = 2, .nvme_bytes = -1}); }),
              HasSubstr("nvme_bytes: expected 0 (not known) or more, got -1"));
  EXPECT_THAT(
      refusal([] { plan_layers({.ranks = 8, .context = 2, .expert = 3}); }),
      HasSubstr("expert: expected a divisor of the 4 ranks that have other samples, got 3"));
  EXPECT_THAT(refusal([] { plan_layers({.ranks = 4, .expert = 2}); }),
              HasSubstr("the module has no layer of experts"));
  EXPECT_THAT(refusal([] { plan_states(1000, 2, {.ranks = 4, .expert = 2}); }),
              HasSubstr("of a mere number of parameters no experts are known"));
  EXPECT_THAT(refusal([] { plan_layers({}, {.micro_steps = 0}); }),
              HasSubstr("micro_steps: expected 1 or more"));
}

// Rajbhandari et al. 2020, "ZeRO", table 1: GB of model states a device, with P_os, P_os+g and P_os+g+p.
struct PaperRow {
  double parameters;
  int ranks;
  std::array<const char*, 3> printed;  // by stage
};

const PaperRow kPaper[] = {
    {7.5e9, 1, {"120", "120", "120"}},      {7.5e9, 4, {"52.5", "41.3", "30"}},
    {7.5e9, 16, {"35.6", "21.6", "7.5"}},   {7.5e9, 64, {"31.4", "16.6", "1.88"}},
    {7.5e9, 256, {"30.4", "15.4", "0.47"}}, {7.5e9, 1024, {"30.1", "15.1", "0.12"}},
    {128e9, 1, {"2048", "2048", "2048"}},   {128e9, 4, {"896", "704", "512"}},
    {128e9, 16, {"608", "368", "128"}},     {128e9, 64, {"536", "284", "32"}},
    {128e9, 256, {"518", "263", "8"}},      {128e9, 1024, {"513", "257", "2"}},
    {1e12, 1, {"16000", "16000", "16000"}}, {1e12, 4, {"7000", "5500", "4000"}},
    {1e12, 16, {"4750", "2875", "1000"}},   {1e12, 64, {"4187", "2218", "250"}},
    {1e12, 256, {"4046", "2054", "62.5"}},  {1e12, 1024, {"4011", "2013", "15.6"}},
};

// The paper rounds what it prints with a point. What it prints as whole numbers of three digits and more it cuts: 513.5,
// 257.75, 4187.5, 2218.75, 4046.875, 2054.69, 4011.72 and 2013.67.
std::string as_printed(double gigabytes, const std::string& printed) {
  const size_t point = printed.find('.');
  const auto digits = point == std::string::npos ? 0 : static_cast<int>(printed.size() - point - 1);
  const double unit = std::pow(10.0, digits);
  const double value =
      digits == 0 ? std::floor(gigabytes) : std::floor(gigabytes * unit + 0.5) / unit;
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

TEST(PlanStatesTest, GivesEveryFigureOfZerosTable) {
  PlanOptions options;
  options.training.compute_dtype = c10::kBFloat16;
  options.training.accumulate_dtype = c10::kBFloat16;
  for (const PaperRow& row : kPaper) {
    const Plan plan = plan_states(static_cast<int64_t>(row.parameters), /*states=*/2,
                                  {.ranks = row.ranks}, options);
    EXPECT_FALSE(plan.has_steps);
    for (int stage = 1; stage <= 3; ++stage) {
      const int64_t bytes = find(plan, {.stage = stage}).at_peak[Tier::kDevice].total();
      const std::string printed = row.printed[static_cast<size_t>(stage) - 1];
      EXPECT_EQ(as_printed(static_cast<double>(bytes) / 1e9, printed), printed)
          << row.parameters << " parameters, " << row.ranks << " ranks, stage " << stage << ": "
          << bytes << " bytes";
    }
  }
}

torch::nn::Sequential make_words() {
  return torch::nn::Sequential(torch::nn::Embedding(8192, 32), torch::nn::Linear(32, 8192));
}

// Tokens have a loss over classes, which keeps as much as the logits again and more.
TEST(PlanTest, TakesTheLossAndSaysWhereItWasGuessed) {
  const torch::Tensor tokens = torch::zeros({4, 16}, torch::kInt64);
  const PlanOptions options{.stages = {0}, .policies = {CheckpointPolicy::kNone}};
  ::testing::internal::CaptureStderr();
  const Plan guessed = plan(make_words, tokens, {}, options);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("forward takes integers and no loss was given"));
  ::testing::internal::CaptureStderr();
  const Plan given = plan(
      make_words, tokens, tokens,
      [](const torch::Tensor& logits, const torch::Tensor& next) {
        return torch::nn::functional::cross_entropy(logits.flatten(0, 1), next.flatten());
      },
      {}, options);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  constexpr int64_t kLogitBytes = 4 * 16 * 8192 * 4;
  EXPECT_GT(given.choice()->at_peak[Tier::kDevice].total(),
            guessed.choice()->at_peak[Tier::kDevice].total() + kLogitBytes / 2);
}

TEST(PlanTest, ShowsPagesWhereTheyDiffer) {
  EXPECT_THAT(plan_layers({}).to_string(), ::testing::Not(HasSubstr("prefetch")));
  const std::string text =
      plan_layers({.ranks = 2, .device_memory_bytes = 1},
                  {.stages = {3}, .paging = {{}, {.page_bytes = 1_MiB, .prefetch_bytes = 0}}})
          .to_string();
  EXPECT_THAT(text, HasSubstr("checkpoint      pages  prefetch      step     device"));
  EXPECT_THAT(text, HasSubstr("1.0 MiB       0 B         -"));
}

// Sharded parameters are sent once more, so they are not for free.
TEST(PlanStatesTest, PrefersStagesThatSendLess) {
  const Plan plan = plan_states(7'500'000'000, 2, {.ranks = 64});
  ASSERT_NE(plan.choice(), nullptr);
  EXPECT_EQ(text_of(plan.choice()->setting.stage), "2");
  const Plan tight =
      plan_states(7'500'000'000, 2, {.ranks = 64, .device_memory_bytes = 16'000'000'000});
  ASSERT_NE(tight.choice(), nullptr);
  EXPECT_EQ(text_of(tight.choice()->setting.stage), "3");
  EXPECT_EQ(tight.choice()->setting.optimizer, Tier::kDevice);
}

TEST(PlanStatesTest, RefusesNoParameters) {
  EXPECT_THAT(refusal([] { plan_states(0, 2, {}); }),
              HasSubstr("expected 1 parameter or more, got 0"));
}

}  // namespace
}  // namespace zeropage::plan_test
