// Batch norm over ranks equals one rank with the whole batch.
#include <atomic>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "operators/tensor_mark.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/zeropage.h"

namespace zeropage::sync_batch_norm_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::nn::BatchNormOptions;

constexpr int kRanks = 3;
constexpr int kSteps = 3;

struct Kind {
  bool affine = true;
  bool tracks = true;
  std::optional<double> momentum = 0.1;
};

BatchNormOptions norm_options(int64_t channels, const Kind& kind) {
  return BatchNormOptions(channels)
      .affine(kind.affine)
      .track_running_stats(kind.tracks)
      .momentum(kind.momentum);
}

// [batch, 2, 3, 3] -> [batch, 5]
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Kind& kind = {})
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 2)))),
        first(register_module("first", torch::nn::BatchNorm2d(norm_options(4, kind)))),
        middle(register_module("middle", torch::nn::Linear(16, 5))),
        second(register_module("second", torch::nn::BatchNorm1d(BatchNormOptions(5)))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = middle(torch::relu(first(conv(x))).flatten(1));
    // [batch, 5, 2], so that a batch of one row has two values a channel.
    return second(torch::stack({y, y.sin()}, 2)).tanh().sum(2);
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d first;
  torch::nn::Linear middle;
  torch::nn::BatchNorm1d second;
};
TORCH_MODULE(Net);

enum class How { kPlainly, kInARegion, kRecomputed };

Net make_net(torch::Dtype dtype, const Kind& kind) {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(3);
  Net net(kind);
  net->to(dtype);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.add_(torch::rand_like(parameter), 0.5);
  return net;
}

// The batches of all ranks, with a mean that is large beside the deviation.
torch::Tensor batch_of(int step, torch::Dtype dtype) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step + 1));
  return torch::randn({7, 2, 3, 3}, generator, torch::kDouble).add_(2).to(dtype);
}

struct Share {
  int64_t first = 0;
  int64_t count = 0;
};

Share share_of(int rank) {
  constexpr Share kShares[] = {{0, 4}, {4, 2}, {6, 1}};
  return kShares[rank];
}

torch::Tensor loss_of(const torch::Tensor& outputs) {
  return (outputs - 0.3).pow(3).sum() + outputs.square().sum();
}

using Values = std::vector<torch::Tensor>;

Values values_of(const torch::nn::Module& module) {
  Values values;
  for (const auto& parameter : module.parameters()) values.push_back(parameter.detach().clone());
  for (const auto& buffer : module.buffers()) values.push_back(buffer.clone());
  return values;
}

// One rank with all samples; what is stepped by is the mean over three ranks.
Values train_alone(torch::Dtype dtype, const Kind& kind, Values* of_inputs) {
  Net net = make_net(dtype, kind);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const torch::Tensor x = batch_of(step, dtype).requires_grad_();
    (loss_of(net(x)) / kRanks).backward();
    optimizer.step();
    of_inputs->push_back(x.grad() * kRanks);
  }
  return values_of(*net);
}

// How large the gradients of a step are beside their largest terms: the statistics' part of them
// nearly cancels the rest, so with statistics that are constants they are larger. All in fp64.
double cancellation_in(Net net, const torch::Tensor& x) {
  const auto largest_gradient = [&] {
    net->zero_grad();
    const torch::Tensor input = x.detach().requires_grad_();
    loss_of(net(input)).backward();
    double largest = input.grad().abs().max().item<double>();
    for (const auto& parameter : net->parameters()) {
      largest = std::max(largest, parameter.grad().abs().max().item<double>());
    }
    return largest;
  };
  const double with_statistics = largest_gradient();
  // The running statistics become those of this batch.
  net->first->options.momentum(1);
  net->second->options.momentum(1);
  net(x);
  net->eval();
  return std::max(1.0, largest_gradient() / std::max(1.0, with_statistics));
}

// The most that two computations in a precision of unit roundoff u may be apart, relative to the
// largest number. Rounding errors of N operations in a row are lambda sqrt(N) u of the terms with a
// probability of 1 - 2 exp(-lambda^2 / 2) (Higham and Mary 2019, "A new approach to probabilistic
// rounding error analysis", theorem 2.4). Both have such an error, in each step so far.
double tolerance_of(torch::Dtype dtype, double cancellation, int steps) {
  constexpr double kLambda = 5;
  constexpr double kOperators = 2 * 9;   // of the forward, and as many of the backward
  constexpr double kLongestSum = 7 * 4;  // samples and places of a channel
  const double roundoff = std::ldexp(1.0, dtype == torch::kDouble ? -53 : -24);
  return 2 * steps * kLambda * std::sqrt(kOperators * kLongestSum) * roundoff * cancellation;
}

double distance(const torch::Tensor& expected, const torch::Tensor& actual) {
  const double largest = std::max(1.0, expected.abs().max().item<double>());
  return (expected - actual).abs().max().item<double>() / largest;
}

class SyncBatchNormTest : public ::testing::TestWithParam<std::tuple<torch::Dtype, How>> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  torch::Dtype dtype() const { return std::get<0>(GetParam()); }
  How how() const { return std::get<1>(GetParam()); }

  torch::Tensor loss(DistributedDataParallel<Net>& model, checkpointing::Recompute& recompute,
                     const torch::Tensor& x) const {
    if (how() == How::kInARegion) {
      return loss_of(checkpoint([&](const torch::Tensor& input) { return model(input); }, x));
    }
    std::optional<ActivationScope> scope;
    if (how() == How::kRecomputed) scope.emplace(recompute);
    return loss_of(model(x));
  }

  void expect_one_batch(const Kind& kind, int stage, bool marked_after_wrapping) const {
    SCOPED_TRACE(c10::str("stage ", stage, ", affine ", kind.affine, ", tracks ", kind.tracks));
    Values of_inputs;
    const Values expected = train_alone(dtype(), kind, &of_inputs);
    Net exact = make_net(torch::kDouble, {});
    const double cancellation = cancellation_in(exact, batch_of(0, torch::kDouble));
    run_ranks(kRanks, [&](World& world) {
      Net net = make_net(dtype(), kind);
      if (!marked_after_wrapping) sync_batch_norm(net, world);
      Options options;
      options.stage = stage_of(stage);
      options.page_bytes = 4_KiB;
      options.update_by = UpdateBy::kClass;
      DistributedDataParallel<Net> model(net, world, options);
      if (marked_after_wrapping) sync_batch_norm(net, world);
      Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.05));
      RecomputeOptions selective = RecomputeOptions::selective();
      selective.least_bytes = 64;
      auto recompute = zeropage::recompute(model, selective);
      const int64_t replays = checkpointing::recompute_statistics().replays;
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        const Share share = share_of(world.rank());
        const auto mine = [&](const torch::Tensor& all) {
          return all.narrow(0, share.first, share.count);
        };
        const torch::Tensor x = mine(batch_of(step, dtype())).clone().requires_grad_();
        loss(model, recompute, x).backward();
        const torch::Tensor& of_input = of_inputs[static_cast<size_t>(step)];
        EXPECT_LE(distance(mine(of_input), x.grad()), tolerance_of(dtype(), cancellation, step + 1))
            << "the input's gradient in step " << step;
        optimizer.step();
      }
      EXPECT_EQ(checkpointing::recompute_statistics().replays > replays, how() != How::kPlainly);
      const GatheredParameters whole(model);
      const Values actual = values_of(*net);
      ASSERT_EQ(expected.size(), actual.size());
      for (size_t index = 0; index < actual.size(); ++index) {
        EXPECT_LE(distance(expected[index], actual[index]),
                  tolerance_of(dtype(), cancellation, kSteps))
            << "rank " << world.rank() << ", tensor " << index;
      }
    });
  }
};

TEST_P(SyncBatchNormTest, WithBatchesOf4And2And1IsOneBatchOf7) {
  for (const int stage : {0, 1, 2, 3}) expect_one_batch({}, stage, /*after=*/stage % 2 == 1);
}

class SyncBatchNormKindsTest : public SyncBatchNormTest {};

TEST_P(SyncBatchNormKindsTest, TakesEveryKindOfLayerThatHasATensor) {
  for (const int stage : {0, 3}) {
    expect_one_batch({.affine = false}, stage, false);
    expect_one_batch({.tracks = false}, stage, false);
    expect_one_batch({.momentum = std::nullopt}, stage, false);
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<torch::Dtype, How>>& info) {
  constexpr const char* kWays[] = {"Plainly", "InARegion", "Recomputed"};
  return c10::str(std::get<0>(info.param), kWays[static_cast<int>(std::get<1>(info.param))]);
}

INSTANTIATE_TEST_SUITE_P(DtypesAndWays, SyncBatchNormTest,
                         ::testing::Combine(::testing::Values(torch::kFloat, torch::kDouble),
                                            ::testing::Values(How::kPlainly, How::kInARegion,
                                                              How::kRecomputed)),
                         name_of);

// What differs between the kinds is not arithmetic.
INSTANTIATE_TEST_SUITE_P(Ways, SyncBatchNormKindsTest,
                         ::testing::Combine(::testing::Values(torch::kDouble),
                                            ::testing::Values(How::kPlainly, How::kInARegion,
                                                              How::kRecomputed)),
                         name_of);

// ---- what passes between ranks ----

struct Sent {
  int64_t forward = 0;
  int64_t backward = 0;
};

Sent sent_by(How how, const Kind& kind = {}) {
  Sent sent;
  run_ranks(2, [&](World& world) {
    Net net = make_net(torch::kFloat, kind);
    sync_batch_norm(net, world);
    RecomputeOptions selective = RecomputeOptions::selective();
    selective.least_bytes = 8;  // so that statistics do not stay for their size
    checkpointing::Recompute recompute(selective);
    const torch::Tensor x = batch_of(0, torch::kFloat).requires_grad_();
    const auto now = [&] { return world.communicator().wire_traffic(); };
    const auto before = now();
    torch::Tensor loss;
    if (how == How::kInARegion) {
      loss = loss_of(checkpoint([&](const torch::Tensor& input) { return net(input); }, x));
    } else {
      std::optional<ActivationScope> scope;
      if (how == How::kRecomputed) scope.emplace(recompute);
      loss = loss_of(net(x));
    }
    const auto after = now();
    EXPECT_EQ(after.all_reduce, before.all_reduce);
    loss.backward();
    if (world.rank() != 0) return;
    EXPECT_EQ(now().all_reduce.bytes - before.all_reduce.bytes, 2 * 8 * (4 + 5));
    sent = {after.all_gather.bytes - before.all_gather.bytes,
            now().all_gather.bytes - after.all_gather.bytes};
  });
  return sent;
}

TEST(SyncBatchNormTrafficTest, IsAGatherInForwardAndOneInTheRepetitionOfARegion) {
  constexpr int64_t kGathers = 8 * (1 + 2 * 4) + 8 * (1 + 2 * 5);
  const Sent plainly = sent_by(How::kPlainly);
  EXPECT_EQ(plainly.forward, kGathers);
  EXPECT_EQ(plainly.backward, 0);
  const Sent region = sent_by(How::kInARegion);
  EXPECT_EQ(region.forward, kGathers);
  EXPECT_EQ(region.backward, kGathers);
}

TEST(SyncBatchNormTrafficTest, IsNotRepeatedByRecompute) {
  for (const bool tracks : {true, false}) {
    const Sent sent = sent_by(How::kRecomputed, {.tracks = tracks});
    EXPECT_GT(sent.forward, 0);
    EXPECT_EQ(sent.backward, 0) << "tracks: " << tracks;
  }
}

// ---- when it is LibTorch's ----

TEST(SyncBatchNormEvaluationTest, IsDoneByARankAloneWithLibTorchsBits) {
  for (const bool tracks : {true, false}) {
    Net plain = make_net(torch::kFloat, {.tracks = tracks});
    plain->eval();
    const torch::Tensor x = batch_of(0, torch::kFloat);
    run_ranks(2, [&](World& world) {
      Net net = make_net(torch::kFloat, {.tracks = tracks});
      sync_batch_norm(net, world);
      net->eval();
      if (world.rank() == 0) {
        EXPECT_TRUE(torch::equal(plain(x), net(x)));
      }
      world.communicator().barrier("the end").wait();
    });
  }
}

TEST(SyncBatchNormEvaluationTest, IsLibTorchsInAWorldOfOneRank) {
  Net plain = make_net(torch::kFloat, {});
  run_ranks(1, [&](World& world) {
    Net net = make_net(torch::kFloat, {});
    sync_batch_norm(net, world);
    const torch::Tensor x = batch_of(0, torch::kFloat);
    EXPECT_TRUE(torch::equal(plain(x), net(x)));
    EXPECT_TRUE(torch::equal(plain->first->running_var, net->first->running_var));
  });
}

// ---- batches ----

TEST(SyncBatchNormBatchTest, MayBeEmptyOnARank) {
  torch::nn::BatchNorm2d alone(3);
  const torch::Tensor all = batch_of(0, torch::kDouble).repeat({1, 2, 1, 1}).narrow(1, 0, 3);
  alone->to(torch::kDouble);
  const torch::Tensor x = all.clone().requires_grad_();
  loss_of(alone(x)).backward();
  run_ranks(kRanks, [&](World& world) {
    torch::nn::BatchNorm2d norm(3);
    norm->to(torch::kDouble);
    sync_batch_norm(norm, world);
    const int64_t counts[] = {5, 0, 2};
    const int64_t firsts[] = {0, 5, 5};
    const auto mine = [&](const torch::Tensor& whole) {
      return whole.narrow(0, firsts[world.rank()], counts[world.rank()]);
    };
    const torch::Tensor own = mine(all).clone().requires_grad_();
    loss_of(norm(own)).backward();
    EXPECT_TRUE(torch::allclose(own.grad(), mine(x.grad()), 1e-12, 1e-12));
    EXPECT_TRUE(torch::allclose(norm->running_var, alone->running_var, 1e-12, 1e-12));
    const torch::Tensor sum = world.sum(norm->weight.grad());
    EXPECT_TRUE(torch::allclose(sum, alone->weight.grad(), 1e-12, 1e-12));
  });
}

TEST(SyncBatchNormBatchTest, OfOneValueOnAllRanksIsRefusedOnAllAlike) {
  run_ranks(2, [&](World& world) {
    parallel::SyncBatchNorm norm(BatchNormOptions(3), world);
    EXPECT_THAT(error_of([&] {
                  norm(torch::ones({1 - world.rank(), 3}));
                }),
                HasSubstr("a SyncBatchNorm of 3 channels: expected two or more values"));
  });
}

TEST(SyncBatchNormBatchTest, MayBeInALowerPrecisionThanTheLayer) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    torch::nn::BatchNorm2d alone(2);
    const torch::Tensor all = batch_of(0, dtype);
    const torch::Tensor x = all.to(torch::kFloat).requires_grad_();
    loss_of(alone(x)).backward();
    run_ranks(kRanks, [&](World& world) {
      torch::nn::BatchNorm2d norm(2);
      if (dtype == torch::kBFloat16) norm->weight.set_data(norm->weight.to(dtype));
      sync_batch_norm(norm, world);
      const Share share = share_of(world.rank());
      const torch::Tensor own = all.narrow(0, share.first, share.count).clone().requires_grad_();
      const torch::Tensor outputs = norm(own);
      EXPECT_EQ(outputs.scalar_type(), dtype);
      loss_of(outputs.to(torch::kFloat)).backward();
      const torch::Tensor expected = x.grad().narrow(0, share.first, share.count);
      EXPECT_LE(distance(expected, own.grad().to(torch::kFloat)), 0.05);
      EXPECT_TRUE(torch::allclose(norm->running_var, alone->running_var, 1e-5, 1e-6));
    });
  }
}

// ---- the module that is written out ----

TEST(SyncBatchNormModuleTest, HasTheBitsOfAMarkedBatchNorm) {
  run_ranks(kRanks, [&](World& world) {
    for (const bool cumulative : {true, false}) {
      auto options = BatchNormOptions(2);
      if (cumulative) options.momentum(std::nullopt);
      parallel::SyncBatchNorm written(options, world);
      torch::nn::BatchNorm2d marked(options);
      sync_batch_norm(marked, world);
      for (int step = 0; step < kSteps; ++step) {
        const Share share = share_of(world.rank());
        const torch::Tensor x = batch_of(step, torch::kFloat).narrow(0, share.first, share.count);
        EXPECT_TRUE(torch::equal(written(x), marked(x)));
      }
      EXPECT_TRUE(torch::equal(written->running_mean, marked->running_mean));
      EXPECT_TRUE(torch::equal(written->running_var, marked->running_var));
      written->eval();
      marked->eval();
      const torch::Tensor x = batch_of(9, torch::kFloat);
      EXPECT_TRUE(torch::equal(written(x), marked(x)));
    }
  });
}

TEST(SyncBatchNormModuleTest, TakesASingleRowAndNeedsNoTensors) {
  run_ranks(2, [&](World& world) {
    parallel::SyncBatchNorm norm(BatchNormOptions(3).affine(false).track_running_stats(false),
                                 world);
    const torch::Tensor rows = torch::tensor({{1.0, 2.0, 3.0}, {3.0, 6.0, -5.0}});
    const torch::Tensor expected = torch::tensor({{-1.0, -1.0, 1.0}, {1.0, 1.0, -1.0}});
    const torch::Tensor actual = norm(rows.narrow(0, world.rank(), 1));
    EXPECT_TRUE(torch::allclose(actual, expected.narrow(0, world.rank(), 1), 1e-4));
  });
}

// ---- marks ----

TEST(SyncBatchNormMarkTest, StaysWhereParametersAreGivenAnotherDtype) {
  for (const int stage : {0, 3}) {
    run_ranks(2, [&](World& world) {
      Net net = make_net(torch::kFloat, {});
      sync_batch_norm(net, world);
      Options options;
      options.stage = stage_of(stage);
      options.compute_dtype = torch::kBFloat16;
      options.stays_fp32 = ModuleSelection::none();
      DistributedDataParallel<Net> model(net, world, options);
      EXPECT_EQ(net->first->weight.scalar_type(), torch::kBFloat16);
      model(batch_of(0, torch::kFloat) * (1 + world.rank()));
      const torch::Tensor other = world.max(net->first->running_mean);
      EXPECT_TRUE(torch::equal(other, net->first->running_mean))
          << "ranks have their own statistics";
    });
  }
}

TEST(SyncBatchNormMarkTest, IsRefusedWhereItCannotBeOrWouldBeLost) {
  run_ranks(2, [&](World& world) {
    const auto mark = [&](auto module) {
      return error_of([&] { sync_batch_norm(module, world); });
    };
    EXPECT_THAT(mark(torch::nn::Sequential(torch::nn::Linear(2, 2))), HasSubstr("found none"));
    EXPECT_THAT(mark(torch::nn::Sequential(torch::nn::BatchNorm1d(
                    BatchNormOptions(2).affine(false).track_running_stats(false)))),
                AllOf(HasSubstr("the BatchNorm \"0\""), HasSubstr("SyncBatchNorm in its place")));
    EXPECT_THAT(mark(world.rank() == 0 ? torch::nn::BatchNorm1d(2) : torch::nn::BatchNorm1d(3)),
                HasSubstr("channels 3"));
    Net net = make_net(torch::kFloat, {});
    EXPECT_EQ(mark(net), "");
    EXPECT_THAT(mark(net), HasSubstr("mark a module once"));
    EXPECT_THAT(error_of([&] { net->to(torch::kDouble); }),
                AllOf(HasSubstr("the BatchNorm \"first\" that sync_batch_norm() marked"),
                      HasSubstr("call ->to() on the module before")));
    net->to(torch::kFloat);
  });
}

TEST(SyncBatchNormMarkTest, SurvivesASavedStateThatIsLoadedIntoTheModule) {
  run_ranks(2, [&](World& world) {
    torch::nn::BatchNorm2d plain(2), norm(2);
    torch::nn::init::constant_(plain->weight, 3);
    sync_batch_norm(norm, world);
    std::stringstream file;
    torch::save(plain, file);
    torch::load(norm, file);
    EXPECT_EQ(norm->weight[0].item<float>(), 3);
    norm(batch_of(world.rank(), torch::kFloat));
    EXPECT_TRUE(torch::equal(world.max(norm->running_mean), norm->running_mean));
  });
}

// ---- ranks that do otherwise ----

TEST(SyncBatchNormOrderTest, OfLayersThatDiffersBetweenRanksIsAnErrorThatNamesBoth) {
  const auto errors = try_ranks(2, [&](World& world) {
    torch::nn::Sequential both(torch::nn::BatchNorm1d(3), torch::nn::BatchNorm1d(3));
    sync_batch_norm(both, world);
    const auto first = static_cast<size_t>(world.rank());
    const torch::Tensor x = torch::randn({4, 3});
    both[first]->as<torch::nn::BatchNorm1d>()->forward(x);
  });
  EXPECT_THAT(message_of(errors[0]),
              AllOf(HasSubstr("the BatchNorm \"0\""), HasSubstr("the BatchNorm \"1\"")));
}

TEST(SyncBatchNormOrderTest, ASecondDerivativeIsRefused) {
  run_ranks(2, [&](World& world) {
    torch::nn::BatchNorm1d norm(3);
    sync_batch_norm(norm, world);
    const torch::Tensor x = torch::randn({4, 3}).requires_grad_();
    const torch::Tensor loss = norm(x).pow(3).sum();
    EXPECT_THAT(error_of([&] {
                  torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true,
                                        /*create_graph=*/true);
                }),
                HasSubstr("second derivative"));
  });
}

}  // namespace
}  // namespace zeropage::sync_batch_norm_test
