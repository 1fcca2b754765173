// A decoder of fused operators trains as the same decoder of LibTorch's operators: at every stage, recomputed, in checkpointed regions,
// with slices of a tensor axis, and in a simulated world.
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::fused_modules_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using torch::Tensor;

constexpr int64_t kVocabulary = 129, kWidth = 24, kHeads = 4, kHead = 6, kHidden = 40, kLength = 9,
                  kSteps = 3;

Tensor angle_table() {
  const Tensor rates =
      torch::pow(10000.0, -torch::arange(0, kHead / 2, torch::kDouble) * 2 / kHead);
  return torch::outer(torch::arange(kLength, torch::kDouble), rates);
}

// One decoder block between a tied embedding and head; the loss is forward's result. ids, targets: [batch, kLength] -> []
template <bool kFused>
struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    const auto linear = [](int64_t inputs, int64_t outputs, bool bias) {
      return torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(bias));
    };
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    norm1 = register_parameter("norm1", torch::rand({kWidth}) + 0.5);
    queries = register_module("queries", linear(kWidth, kWidth, false));
    keys = register_module("keys", linear(kWidth, kWidth, false));
    values = register_module("values", linear(kWidth, kWidth, false));
    out = register_module("out", linear(kWidth, kWidth, false));
    norm2 = register_parameter("norm2", torch::rand({kWidth}) + 0.5);
    norm2_bias = register_parameter("norm2_bias", torch::rand({kWidth}));
    gate = register_module("gate", linear(kWidth, kHidden, false));
    up = register_module("up", linear(kWidth, kHidden, false));
    down = register_module("down", linear(kHidden, kWidth, false));
    norm3 = register_parameter("norm3", torch::rand({kWidth}) + 0.5);
    widen = register_module("widen", linear(kWidth, kHidden, false));
    widen_bias = register_parameter("widen_bias", torch::rand({kHidden}));
    narrow = register_module("narrow", linear(kHidden, kWidth, true));
    cosines = register_buffer("cosines", angle_table().cos().to(torch::kFloat));
    sines = register_buffer("sines", angle_table().sin().to(torch::kFloat));
  }

  Tensor rms(const Tensor& x, const Tensor& weight) {
    if constexpr (kFused) return fused::rms_norm(x, weight);
    return x * (x.square().mean(-1, true) + 1e-6).rsqrt() * weight;
  }
  Tensor turned(const Tensor& heads) {
    if constexpr (kFused) return fused::rotary(heads, cosines, sines);
    const auto halves = heads.chunk(2, -1);
    return torch::cat(
        {halves[0] * cosines - halves[1] * sines, halves[1] * cosines + halves[0] * sines}, -1);
  }
  // The norm of the sum, and the sum.
  fused::Added add_norm(const Tensor& x, const Tensor& residual) {
    if constexpr (kFused) return fused::add_layer_norm(x, residual, norm2, norm2_bias);
    const Tensor sum = x + residual;
    return {torch::layer_norm(sum, {kWidth}, norm2, norm2_bias), sum};
  }
  Tensor gated(const Tensor& x) {
    if constexpr (kFused) return fused::swiglu(gate(x), up(x));
    return torch::silu(gate(x)) * up(x);
  }
  Tensor widened(const Tensor& x) {
    if constexpr (kFused) return fused::bias_gelu(widen(x), widen_bias);
    return torch::gelu(widen(x) + widen_bias);
  }
  Tensor loss_of(const Tensor& x, const Tensor& targets) {
    // Four tokens a tile.
    if constexpr (kFused) {
      return fused::linear_cross_entropy(x, tokens->weight, targets,
                                         {.tile_bytes = 4 * 4 * kVocabulary});
    }
    return torch::nn::functional::cross_entropy(
        torch::linear(x, tokens->weight).view({-1, kVocabulary}), targets.view({-1}));
  }

  Tensor forward(const Tensor& ids, const Tensor& targets) {
    Tensor x = tokens(ids);
    const Tensor normed = rms(x, norm1);
    const auto by_head = [](const Tensor& t) {
      return t.view({t.size(0), t.size(1), -1, kHead}).transpose(1, 2);
    };
    const Tensor mixed = at::scaled_dot_product_attention(
        turned(by_head(queries(normed))), turned(by_head(keys(normed))), by_head(values(normed)),
        {}, 0.0, /*is_causal=*/true);
    const fused::Added added = add_norm(out(mixed.transpose(1, 2).flatten(2)), x);
    x = added.sum + down(gated(added.normed));
    x = x + narrow(widened(x));
    return loss_of(rms(x, norm3), targets);
  }

  torch::nn::Embedding tokens{nullptr};
  torch::nn::Linear queries{nullptr}, keys{nullptr}, values{nullptr}, out{nullptr}, gate{nullptr},
      up{nullptr}, down{nullptr}, widen{nullptr}, narrow{nullptr};
  Tensor norm1, norm2, norm2_bias, norm3, widen_bias, cosines, sines;
};
using PlainDecoderImpl = DecoderImpl<false>;
using FusedDecoderImpl = DecoderImpl<true>;
TORCH_MODULE(PlainDecoder);
TORCH_MODULE(FusedDecoder);

template <typename Decoder>
Decoder make_decoder() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(5);
  return Decoder();
}

// Uneven over ranks, and with tokens that have no loss.
struct Batch {
  Tensor ids, targets;
};
Batch batch_of(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * step + rank));
  const Tensor drawn =
      torch::randint(kVocabulary, {2 + rank, kLength + 1}, generator, torch::kLong);
  Batch batch{drawn.slice(1, 0, kLength), drawn.slice(1, 1).clone()};
  batch.targets.view({-1}).slice(0, 0, 5).fill_(-100);
  return batch;
}

// Plain LibTorch's losses by rank and step, and the parameters at the end.
struct Trained {
  std::vector<std::vector<double>> losses;
  std::vector<Tensor> parameters;
};
Trained plainly_trained(int ranks) {
  PlainDecoder decoder = make_decoder<PlainDecoder>();
  torch::optim::AdamW optimizer(decoder->parameters(), torch::optim::AdamWOptions(1e-2));
  Trained trained;
  trained.losses.resize(static_cast<size_t>(ranks));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      const Batch batch = batch_of(rank, step);
      const Tensor loss = decoder(batch.ids, batch.targets);
      (loss / ranks).backward();
      trained.losses[static_cast<size_t>(rank)].push_back(loss.item<double>());
    }
    optimizer.step();
  }
  trained.parameters = decoder->parameters();
  return trained;
}

enum class How { kPlainly, kInARegion, kRecomputed };

class FusedModulesTest : public ::testing::TestWithParam<std::tuple<int, How>> {};

TEST_P(FusedModulesTest, TrainAsLibTorchsOperatorsDo) {
  const auto [stage, how] = GetParam();
  at::set_num_threads(1);
  constexpr int kRanks = 2;
  const Trained expected = plainly_trained(kRanks);
  run_ranks(kRanks, [&, stage = stage, how = how](World& world) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    DistributedDataParallel<FusedDecoder> model(make_decoder<FusedDecoder>(), world, options);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-2));
    RecomputeOptions everything = RecomputeOptions::selective();
    everything.least_bytes = 1;
    checkpointing::Recompute recompute(everything);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const Batch batch = batch_of(world.rank(), step);
      Tensor loss;
      if (how == How::kInARegion) {
        loss = checkpoint([&](const Tensor& ids) { return model(ids, batch.targets); }, batch.ids);
      } else {
        std::optional<ActivationScope> scope;
        if (how == How::kRecomputed) scope.emplace(recompute);
        loss = model(batch.ids, batch.targets);
      }
      EXPECT_NEAR(loss.item<double>(),
                  expected.losses[static_cast<size_t>(world.rank())][static_cast<size_t>(step)],
                  1e-5);
      loss.backward();
      optimizer.step();
    }
    const GatheredParameters gathered(model);
    const auto parameters = model.module()->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_LE(
          (parameters[i].detach() - expected.parameters[i].detach()).abs().max().item<double>(),
          2e-4)
          << i;
    }
  });
}

std::string way_of(const ::testing::TestParamInfo<std::tuple<int, How>>& info) {
  constexpr const char* kWays[] = {"Plainly", "InARegion", "Recomputed"};
  return c10::str("AtStage", std::get<0>(info.param),
                  kWays[static_cast<int>(std::get<1>(info.param))]);
}

INSTANTIATE_TEST_SUITE_P(StagesAndWays, FusedModulesTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(How::kPlainly, How::kInARegion,
                                                              How::kRecomputed)),
                         way_of);

// The vocabulary is cut unevenly, 129 over 2: each rank has its classes' logits, and one tile after another is a collective.
TEST(FusedModulesOverSlicesTest, HaveTheGradientsOfTheWholeModule) {
  at::set_num_threads(1);
  PlainDecoder whole = make_decoder<PlainDecoder>();
  const Batch batch = batch_of(1, 0);
  const Tensor expected = whole(batch.ids, batch.targets);
  expected.backward();
  run_ranks(2, [&](World& world) {
    FusedDecoder decoder = make_decoder<FusedDecoder>();
    tensor_parallel(decoder, world,
                    {{"queries", Cut::column().unit(kHead)},
                     {"keys", Cut::column().unit(kHead)},
                     {"values", Cut::column().unit(kHead)},
                     {"out", Cut::row().unit(kHead)},
                     {"gate", Cut::column()},
                     {"up", Cut::column()},
                     {"down", Cut::row()},
                     {"tokens", Cut::vocabulary()}});
    const Tensor loss = decoder(batch.ids, batch.targets);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5);
    loss.backward();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_NEAR(decoder(batch.ids, batch.targets).item<double>(), expected.item<double>(), 1e-5);
    }
    const auto parameters = decoder->named_parameters();
    for (const auto& item : whole->named_parameters()) {
      const Tensor got = whole_of(parameters[item.key()].grad());
      const double most = item.value().grad().abs().max().item<double>();
      EXPECT_LE((got - item.value().grad()).abs().max().item<double>(), 1e-5 * std::max(1.0, most))
          << item.key();
    }
  });
}

TEST(FusedModulesInASimulatedWorldTest, ArePlannedWithLessThanTheLogitsTake) {
  const auto planned = []<typename Decoder>(Decoder /*empty*/) {
    const Tensor ids = torch::zeros({64, kLength}, torch::kLong);
    const Plan plan = zeropage::plan(
        [] { return Decoder(); }, std::make_tuple(ids, ids), {.ranks = 2},
        {.tiers = {Tier::kDevice}, .stages = {3}, .policies = {CheckpointPolicy::kNone}});
    return plan.forecasts.front().at_peak[Tier::kDevice].activations();
  };
  EXPECT_LT(planned(FusedDecoder(nullptr)),
            planned(PlainDecoder(nullptr)) - 64 * kLength * kVocabulary * 4);
}

}  // namespace
}  // namespace zeropage::fused_modules_test
