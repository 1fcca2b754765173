// What a plan forecasts is what ranks then hold and send: the ledger's peak by kind, the wire to the byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "zeropage/communicator.h"
#include "zeropage/context_parallel.h"
#include "zeropage/plan.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::planned_figures_test {
namespace {

using checkpointing::EveryBlocks;
using memory::Breakdown;
using memory::Kind;
using memory::Tier;
using torch::Tensor;

constexpr int64_t kWidth = 64;
constexpr int64_t kLength = 48;
constexpr int64_t kWords = 300;
constexpr int64_t kBatch = 4;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto by_head = [&](const Tensor& part) {
      return part.view({kBatch, x.size(1), 4, -1}).transpose(1, 2);
    };
    const Tensor mixed = at::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]),
                                                          by_head(parts[2]), {}, 0.0, true);
    const Tensor y = x + mixed.transpose(1, 2).reshape({kBatch, x.size(1), kWidth});
    return y + down(torch::gelu(up(y)));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct SpeakerImpl : torch::nn::Module {
  SpeakerImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(kWords, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int layer = 0; layer < 5; ++layer) blocks->push_back(Block());
  }
  Tensor forward(const Tensor& tokens) {
    const Tensor x = checkpointing::checkpoint_each<Block>(blocks, every, embedding(tokens));
    return torch::nn::functional::linear(x, embedding->weight);
  }
  EveryBlocks every = EveryBlocks::none();
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Speaker);

// length: tokens of a rank.
Tensor loss_of(DistributedDataParallel<Speaker>& model, torch::Device device, int64_t length) {
  const auto tokens =
      torch::zeros({kBatch, length}, torch::TensorOptions().dtype(torch::kInt64).device(device));
  return torch::nn::functional::cross_entropy(model(tokens).view({-1, kWords}), tokens.view({-1}));
}

Options training() {
  Options options;
  options.page_bytes = 96 << 10;
  return options;
}

// Ranks that have some of each sample's tokens.
struct Context {
  int ranks = 1;
  parallel::ContextForm form = parallel::ContextForm::kRing;
  int64_t length() const { return kLength / ranks; }
};

Plan plan_speaker(int ranks, int64_t micro_steps, const Context& context = {}) {
  const ModelToPlan<Speaker> model{
      .construct = [] { return Speaker(); },
      .loss =
          [&](DistributedDataParallel<Speaker>& wrapped) {
            return loss_of(wrapped, torch::kMeta, context.length());
          },
      .checkpoint_blocks = [](Speaker& speaker, EveryBlocks every) { speaker->every = every; },
      .optimizer = {}};
  // The host's kernels compute blocks of attention.
  const WorldDescription world{.ranks = ranks,
                               .context = context.ranks,
                               .context_form = context.form,
                               .device_is_host = context.ranks > 1};
  return plan(model, world, {.training = training(), .micro_steps = micro_steps});
}

struct Measured {
  Breakdown on_device;
  Breakdown on_host;
  int64_t sent_bytes = 0;
};

int64_t sum(const comm::WireTraffic& sent) {
  return sent.all_gather.bytes + sent.reduce_scatter.bytes + sent.all_reduce.bytes +
         sent.broadcast.bytes;
}

// Figures of rank 0.
Measured measure(int ranks, int64_t micro_steps, const PlannedSetting& setting,
                 const Context& context = {}) {
  Measured measured;
  std::mutex random;
  testing::run_ranks(ranks, [&](comm::World& world) {
    Speaker speaker{nullptr};
    {
      const std::lock_guard lock(random);
      speaker = Speaker();
    }
    if (setting.checkpointing == CheckpointPolicy::kBlocks) speaker->every = EveryBlocks::each();
    Options options = training();
    options.stage = setting.stage;
    options.offload = {.optimizer = setting.optimizer, .parameters = setting.parameters};
    const Mesh mesh(world, {{"data", ranks / context.ranks}, {"context", context.ranks}});
    if (context.ranks > 1) {
      parallel::context_parallel(speaker, mesh["context"], context.form);
    }
    DistributedDataParallel<Speaker> model(std::move(speaker), mesh, options);
    Optimizer<torch::optim::AdamW> optimizer(model);
    Accumulator accumulator(model, {.micro_steps = micro_steps});
    checkpointing::Recompute recompute(checkpointing::RecomputeOptions::selective());
    const auto step = [&] {
      for (int64_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
        Tensor loss;
        if (setting.checkpointing == CheckpointPolicy::kSelective) {
          const ActivationScope scope(recompute);
          loss = loss_of(model, torch::kCPU, context.length());
        } else {
          loss = loss_of(model, torch::kCPU, context.length());
        }
        accumulator.backward(loss);
      }
      accumulator.step(optimizer);
    };
    memory::Ledger& ledger = *memory::Ledger::current();
    ledger.reset_peak();
    step();
    const auto sent = [&] {
      const int64_t of_samples = sum(mesh.samples().communicator().wire_traffic());
      if (context.ranks == 1) return of_samples;
      const comm::WireTraffic of_tokens = mesh["context"].communicator().wire_traffic();
      return of_samples + sum(of_tokens) + of_tokens.pair.bytes + of_tokens.all_to_all.bytes;
    };
    const int64_t before = sent();
    step();
    if (world.rank() != 0) return;
    measured = {.on_device = ledger.at_peak(),
                .on_host = ledger.offloaded_at_peak(Tier::kHost),
                .sent_bytes = sent() - before};
  });
  return measured;
}

class PlannedFiguresTest : public ::testing::TestWithParam<std::tuple<int, int64_t>> {};

// A real communicator's segments in shared memory are staging, which no simulated one has.
TEST_P(PlannedFiguresTest, AreWhatRanksHoldAndSend) {
  const auto [ranks, micro_steps] = GetParam();
  const Plan plan = plan_speaker(ranks, micro_steps);
  int compared = 0;
  for (const Forecast& forecast : plan.forecasts) {
    if (forecast.setting.optimizer == Tier::kNvme) continue;
    SCOPED_TRACE(to_string(forecast.setting));
    const Measured real = measure(ranks, micro_steps, forecast.setting);
    const auto of_model = [](const Breakdown& bytes) {
      return static_cast<double>(bytes.total() - bytes[Kind::kStaging]);
    };
    EXPECT_NEAR(of_model(forecast.at_peak[Tier::kDevice]), of_model(real.on_device),
                0.03 * of_model(real.on_device))
        << "forecast " << memory::to_text(forecast.at_peak[Tier::kDevice]) << ", real "
        << memory::to_text(real.on_device);
    EXPECT_EQ(forecast.at_peak[Tier::kHost].persistent(), real.on_host.persistent());
    EXPECT_EQ(forecast.sent.total().bytes, real.sent_bytes);
    ++compared;
  }
  EXPECT_EQ(compared, 9 * 3);
}

INSTANTIATE_TEST_SUITE_P(RanksMicroSteps, PlannedFiguresTest,
                         ::testing::Values(std::tuple(1, 1), std::tuple(2, 1), std::tuple(4, 2)));

// What a rank has that has some of each sample's tokens.
class PlannedContextTest : public ::testing::TestWithParam<std::tuple<int, Context>> {};

TEST_P(PlannedContextTest, IsWhatRanksHoldAndSend) {
  const auto [ranks, context] = GetParam();
  const Plan plan = plan_speaker(ranks, /*micro_steps=*/1, context);
  int compared = 0;
  for (const Forecast& forecast : plan.forecasts) {
    if (forecast.setting.optimizer != Tier::kDevice) continue;
    SCOPED_TRACE(to_string(forecast.setting));
    const Measured real = measure(ranks, 1, forecast.setting, context);
    const auto of_model = [](const Breakdown& bytes) {
      return static_cast<double>(bytes.total() - bytes[Kind::kStaging]);
    };
    EXPECT_NEAR(of_model(forecast.at_peak[Tier::kDevice]), of_model(real.on_device),
                0.03 * of_model(real.on_device))
        << "forecast " << memory::to_text(forecast.at_peak[Tier::kDevice]) << ", real "
        << memory::to_text(real.on_device);
    EXPECT_EQ(forecast.sent.total().bytes, real.sent_bytes);
    ++compared;
  }
  EXPECT_EQ(compared, 4 * 3);
}

// A rank's own part of them: half of what is kept and computed, and what travels between the two by the formulas of
// docs/context_parallelism.md.
TEST(PlannedContextAxisTest, DividesActivationsAndFlopsAndAddsItsMessages) {
  const auto of = [](const Plan& plan) {
    return *std::find_if(plan.forecasts.begin(), plan.forecasts.end(), [](const Forecast& each) {
      return each.setting.stage == Stage::kReplicated && each.setting.optimizer == Tier::kDevice &&
             each.setting.checkpointing == CheckpointPolicy::kNone;
    });
  };
  const Forecast one = of(plan_speaker(1, 1));
  const auto activations = [](const Forecast& of_plan) {
    return static_cast<double>(of_plan.at_peak[Tier::kDevice][Kind::kActivation]);
  };
  const int64_t gradients = of(plan_speaker(2, 1)).sent.total().bytes;
  constexpr int64_t kLayers = 5, kBytes = 4, kStamp = 8;
  constexpr int64_t kRing = kLayers * (2 * (2 * kBatch * (kLength / 2) * kWidth * kBytes + kStamp) +
                                       2 * 2 * kBatch * (kLength / 2) * kWidth * kBytes);
  constexpr int64_t kByHeads =
      kLayers * 2 * 4 * (kBatch * (kLength / 2) * kWidth * kBytes / 2 + kStamp);
  for (const auto& [form, messages] : {std::pair(parallel::ContextForm::kRing, kRing),
                                       std::pair(parallel::ContextForm::kUlysses, kByHeads)}) {
    const Forecast two = of(plan_speaker(2, 1, {.ranks = 2, .form = form}));
    EXPECT_NEAR(activations(two) / activations(one), 0.5, 0.06);
    EXPECT_NEAR(two.flops / one.flops, 0.5, 1e-9);
    EXPECT_EQ(two.sent.total().bytes - gradients, messages);
  }
}

using parallel::ContextForm;
INSTANTIATE_TEST_SUITE_P(RanksContext, PlannedContextTest,
                         ::testing::Values(std::tuple(2, Context{2, ContextForm::kRing}),
                                           std::tuple(4, Context{4, ContextForm::kRing}),
                                           std::tuple(4, Context{2, ContextForm::kRing}),
                                           std::tuple(2, Context{2, ContextForm::kUlysses}),
                                           std::tuple(4, Context{4, ContextForm::kUlysses})));

}  // namespace
}  // namespace zeropage::planned_figures_test
