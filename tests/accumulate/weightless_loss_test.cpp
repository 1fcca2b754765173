// A rank whose micro-batch has weight 0 gives what other ranks' losses ask of it, and nothing of its own loss.
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accumulate/stage_backwards.h"
#include "tests/harness/ranks.h"
#include "zeropage/context_parallel.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/tensor_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::weightless_loss_test {
namespace {

using namespace zeropage::testing;
using torch::Tensor;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int64_t kWidth = 8;
constexpr int64_t kRows = 6;  // of a rank
constexpr int kRanks = 2;

// Where ranks compute with each other's rows.
enum class Meet { kInExperts, kInARing, kByHeads, kInBatchNorm, kNowhere };

struct MixImpl : torch::nn::Module {
  explicit MixImpl(Meet meet) : meet_(meet) {
    if (meet == Meet::kInExperts) {
      experts_ = register_module(
          "experts", parallel::Experts(parallel::ExpertsOptions(kWidth, 12, /*experts=*/4, 2)));
    } else if (meet == Meet::kInBatchNorm) {
      batch_norm_ = register_module("batch_norm", torch::nn::BatchNorm1d(kWidth));
    } else {
      thirds_ = register_module("thirds", torch::nn::Linear(kWidth, 3 * kWidth));
    }
  }
  // x: [1, rows, width].
  Tensor forward(const Tensor& x) {
    if (!experts_.is_empty()) return experts_(x);
    if (!batch_norm_.is_empty()) return batch_norm_(x[0]).unsqueeze(0);
    const Tensor all = thirds_(x);
    if (meet_ == Meet::kNowhere) return all.narrow(-1, 0, kWidth).tanh();
    const auto heads = all.view({1, x.size(1), 3, 2, kWidth / 2}).permute({2, 0, 3, 1, 4});
    return at::scaled_dot_product_attention(heads[0], heads[1], heads[2])
        .transpose(1, 2)
        .reshape(x.sizes());
  }

 private:
  const Meet meet_;
  parallel::Experts experts_{nullptr};
  torch::nn::BatchNorm1d batch_norm_{nullptr};
  torch::nn::Linear thirds_{nullptr};
};
TORCH_MODULE(Mix);

// What is behind the first mixture has gradients of the own loss and of others in one sum.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(Meet meet) {
    stem = register_module("stem", torch::nn::Linear(kWidth, kWidth));
    first = register_module("first", Mix(meet));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    second = register_module("second", Mix(meet));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = stem(x);
    y = y + first(y);
    y = y + second(norm(y));
    return head(y);
  }
  torch::nn::Linear stem{nullptr}, head{nullptr};
  Mix first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Net);

Net make_net(Meet meet) {
  torch::manual_seed(7);
  Net net(meet);
  net->to(torch::kDouble);
  return net;
}

Tensor rows_of(int at) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(at) + 3);
  return torch::randn({1, kRanks * kRows, kWidth}, generator, torch::kDouble);
}

Tensor losses_of_rows(const Tensor& outputs) {
  return outputs.square().sum(-1) / 20;
}

// [step][micro-step][rank]
const std::vector<std::vector<std::vector<double>>> kWeights = {
    {{1, 0}, {0, 2}}, {{3, 0}, {1, 0}}, {{0, 1}, {0.5, 1}}};

// By plain LibTorch: all ranks' rows in one forward, and a weight for each. Returns parameters.
std::vector<Tensor> plainly_trained(Meet meet, const Tensor& ranks_of_rows) {
  Net net = make_net(meet);
  SGD optimizer(net->parameters(), SGDOptions(0.05).momentum(0.9));
  int at = 0;
  for (const auto& step : kWeights) {
    optimizer.zero_grad();
    double all = 0;
    for (const auto& weights : step) all += weights[0] + weights[1];
    for (const auto& weights : step) {
      const Tensor of_rows = torch::tensor(weights, torch::kDouble).index({ranks_of_rows});
      (losses_of_rows(net(rows_of(at++))) * of_rows / all).sum().backward();
    }
    optimizer.step();
  }
  return net->parameters();
}

struct Way {
  Meet meet = Meet::kInExperts;
  int stage = 0;
  ReduceMicroSteps reduce = ReduceMicroSteps::kAuto;
  bool in_halves = false;
  // What a loss of weight 0 is divided by.
  double divisor = 1;
};

const char* axis_of(Meet meet) {
  if (meet == Meet::kInExperts) return "expert";
  return meet == Meet::kInARing || meet == Meet::kByHeads ? "context" : "data";
}

Mesh mesh_of(const World& world, Meet meet) {
  const std::string axis = axis_of(meet);
  if (axis == "data") return {world, {{"data", kRanks}}};
  return {world, {{"data", 1}, {axis, kRanks}}};
}

void let_ranks_meet(Net net, Meet meet, const Mesh& mesh) {
  if (meet == Meet::kInExperts) expert_parallel(net, mesh);
  if (meet == Meet::kInARing) parallel::context_parallel(net, mesh["context"]);
  if (meet == Meet::kByHeads)
    parallel::context_parallel(net, mesh["context"], parallel::ContextForm::kUlysses);
  if (meet == Meet::kInBatchNorm) sync_batch_norm(*net, mesh.world());
}

// This rank's rows of a dimension of all.
Tensor part_of(const Tensor& whole, int64_t dim, Meet meet, const Mesh& mesh) {
  if (std::string(axis_of(meet)) == "context")
    return parallel::split_context(whole, dim, mesh["context"]);
  return whole.narrow(dim, mesh.world().rank() * kRows, kRows);
}

void expect_as_plain(const Way& way) {
  at::set_num_threads(1);
  run_ranks(kRanks, [&](World& world) {
    const Mesh mesh = mesh_of(world, way.meet);
    const Tensor all_rows = torch::arange(kRanks * kRows);
    Tensor ranks_of_rows = torch::zeros({kRanks * kRows}, torch::kLong);
    ranks_of_rows.index_put_({part_of(all_rows, 0, way.meet, mesh)},
                             torch::tensor(int64_t{world.rank()}));
    ranks_of_rows = world.sum(ranks_of_rows);
    static std::mutex generator;
    std::vector<Tensor> expected;
    Net net{nullptr};
    {
      const std::lock_guard lock(generator);
      expected = plainly_trained(way.meet, ranks_of_rows);
      net = make_net(way.meet);
    }
    let_ranks_meet(net, way.meet, mesh);
    Options options;
    options.stage = stage_of(way.stage);
    options.page_bytes = 4096;
    options.minimum_sharded_bytes = 0;
    options.update_by = UpdateBy::kClass;
    DistributedDataParallel<Net> model(net, mesh, options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.05).momentum(0.9));
    Accumulator accumulator(model, {.micro_steps = 2, .reduce = way.reduce});
    int at = 0;
    for (const auto& step : kWeights) {
      for (const auto& weights : step) {
        const double weight = weights[static_cast<size_t>(world.rank())];
        const Tensor x = part_of(rows_of(at++), 1, way.meet, mesh).clone();
        x.requires_grad_(way.in_halves);
        Tensor loss = losses_of_rows(model(x)).sum();
        if (weight == 0) loss = loss / torch::full({}, way.divisor, torch::kDouble);
        if (!way.in_halves) {
          accumulator.backward(loss, weight);
          continue;
        }
        auto backwards = accumulator.stage_backwards();
        auto first = backwards.begin(loss, x, weight);
        EXPECT_TRUE(first.input_gradient().isfinite().all().item<bool>());
        const bool is_zero = first.input_gradient().eq(0).all().item<bool>();
        // Other ranks' losses ask experts for gradients of weights alone.
        const bool has_none = way.meet == Meet::kNowhere || way.meet == Meet::kInExperts;
        EXPECT_EQ(is_zero, weight == 0 && has_none)
            << "on rank " << world.rank() << ", weight " << weight;
        backwards.finish(std::move(first));
      }
      ASSERT_TRUE(accumulator.step(optimizer).stepped());
    }
    const GatheredParameters gathered(model);
    const std::vector<Tensor> actual = model.module()->parameters();
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      const Tensor own = own_slice(actual[i]);
      Tensor want = expected[i].detach();
      if (want.sizes() != own.sizes())
        want = want.narrow(0, world.rank() * own.size(0), own.size(0));
      EXPECT_LE((own - want).abs().max().item<double>(), 1e-12) << i << " on rank " << world.rank();
    }
  });
}

class WeightlessLossTest : public ::testing::TestWithParam<std::tuple<Meet, int>> {
 protected:
  static Way way() {
    const auto& [meet, stage] = GetParam();
    Way way;
    way.meet = meet;
    way.stage = stage;
    return way;
  }
};

// 0 / 0 and 1 / 0, as the mean over no tokens is.
TEST_P(WeightlessLossTest, GivesWhatOtherRanksLossesAskOfIt) {
  for (const auto reduce : {ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce}) {
    for (const double divisor : {1.0, 0.0, std::numeric_limits<double>::quiet_NaN()}) {
      Way way = this->way();
      way.reduce = reduce;
      way.divisor = divisor;
      expect_as_plain(way);
    }
  }
}

TEST_P(WeightlessLossTest, GivesItInABackwardOfTwoHalves) {
  Way way = this->way();
  way.in_halves = true;
  way.divisor = 0;
  expect_as_plain(way);
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Meet, int>>& info) {
  constexpr const char* kMeets[] = {"InExperts", "InARing", "ByHeads", "InBatchNorm", "Nowhere"};
  const auto& [meet, stage] = info.param;
  return c10::str(kMeets[static_cast<int>(meet)], "AtStage", stage);
}

INSTANTIATE_TEST_SUITE_P(MeetingsAndStages, WeightlessLossTest,
                         ::testing::Combine(::testing::Values(Meet::kInExperts, Meet::kInARing,
                                                              Meet::kByHeads, Meet::kInBatchNorm,
                                                              Meet::kNowhere),
                                            ::testing::Values(0, 1, 2, 3)),
                         name_of);

}  // namespace
}  // namespace zeropage::weightless_loss_test
