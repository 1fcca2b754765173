// What is decided by the norm of all gradients, where ranks have slices of parameters: what one rank with
// the whole module decides.
#include <limits>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/parallel/tensor_modules.h"
#include "tests/zero/documented_shards.h"
#include "zeropage/tensor_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::norm_over_slices_test {
namespace {

using namespace zeropage::tensor_modules;
using namespace zeropage::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kTrained = 3;
constexpr double kMostNorm = 0.5;  // below that of any step here
constexpr double kTolerance = 1e-12;

SGDOptions momentum() {
  return SGDOptions(0.1).momentum(0.9);
}

// By their dimensions: matrices, and vectors, of which some are slices and others whole.
std::vector<torch::optim::OptimizerParamGroup> groups_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const torch::Tensor& parameter : module.parameters()) {
    (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  return {{matrices}, {vectors}};
}

// Made before ranks draw from the process's generator.
const Plain& untrained() {
  static const Plain module = make_plain();
  return module;
}

// A module that is cut by a plan, with a whole head beside the tied one.
struct ByPlan {
  using Module = Plain;
  static constexpr bool kCutsHead = false;
  static Module make(const World& world) {
    Plain module = make_plain();
    tensor_parallel(module, world, plan());
    return module;
  }
  static torch::Tensor loss(Module& module, const torch::Tensor& hidden, int seed, const World&) {
    return whole_loss(module->logits(hidden), targets_of(seed));
  }
  static torch::Tensor loss_of_whole(Plain& whole, int seed) {
    return whole_loss(whole->logits(whole(ids_of(seed))), targets_of(seed));
  }
};

// One of layers that are slices; of a Sequence the tokens between the layers are cut too.
template <typename Sliced>
struct ByLayers {
  using Module = Sliced;
  static constexpr bool kCutsHead = true;
  static Module make(const World& world) {
    Module module(world);
    module->to(torch::kDouble);
    take_slices(*module, untrained(), world);
    return module;
  }
  static torch::Tensor loss(Module& module, const torch::Tensor& hidden, int seed,
                            const World& world) {
    return parallel::vocabulary_parallel_cross_entropy(module->head(hidden), targets_of(seed),
                                                       kVocabulary, world);
  }
  static torch::Tensor loss_of_whole(Plain& whole, int seed) {
    return whole_loss(whole->head(whole(ids_of(seed))), targets_of(seed));
  }
};

int seed_of(int step, int data) {
  return 10 * step + data;
}

struct Trained {
  Plain module{nullptr};
  std::vector<double> norms;        // by step, before clipping
  std::vector<double> group_norms;  // of the first step
};

// One rank, with the batches of two.
template <typename How>
Trained train_whole() {
  Trained trained{.module = make_plain()};
  SGD optimizer(trained.module->parameters(), momentum());
  for (int step = 0; step < kTrained; ++step) {
    optimizer.zero_grad();
    for (int data = 0; data < 2; ++data) {
      (How::loss_of_whole(trained.module, seed_of(step, data)) / 2).backward();
    }
    for (const auto& group : groups_of(*trained.module)) {
      double squares = 0;
      for (const torch::Tensor& parameter : group.params()) {
        const torch::Tensor gradient = parameter.grad();
        if (gradient.defined()) squares += gradient.square().sum().item<double>();
      }
      if (step == 0) trained.group_norms.push_back(std::sqrt(squares));
    }
    trained.norms.push_back(
        torch::nn::utils::clip_grad_norm_(trained.module->parameters(), kMostNorm));
    EXPECT_GT(trained.norms.back(), kMostNorm);
    optimizer.step();
  }
  return trained;
}

// Four ranks: two that share slices, times two with other samples.
struct Grid {
  World& all;
  World tensor;
  World data;
};

void on_grid(const std::function<void(const Grid&)>& fn) {
  untrained();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(4, [&](World& all) {
    const int of_tensor = all.rank() % 2, of_data = all.rank() / 2;
    fn({all, axis(store, c10::str("tensor", of_data), of_tensor, all),
        axis(store, c10::str("data", of_tensor), of_data, all)});
  });
}

template <typename How>
DistributedDataParallel<typename How::Module> wrap(const Grid& grid, int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  options.update_by = UpdateBy::kClass;
  return DistributedDataParallel<typename How::Module>(How::make(grid.tensor), grid.data, options);
}

template <typename How>
torch::Tensor loss_on(const Grid& grid, DistributedDataParallel<typename How::Module>& model,
                      int step) {
  const int seed = seed_of(step, grid.data.rank());
  return How::loss(model.module(), model(ids_of(seed)), seed, grid.tensor);
}

template <typename How>
void expect_trained_alike(const Trained& whole, const Grid& grid,
                          DistributedDataParallel<typename How::Module>& model) {
  const GatheredParameters gathered(model);
  const auto parameters = model.module()->named_parameters();
  for (const auto& item : whole.module->named_parameters()) {
    const torch::Tensor expected =
        slice_of(item.key(), item.value().detach(), grid.tensor, How::kCutsHead);
    const torch::Tensor actual = parameters[item.key()].detach();
    EXPECT_LE((expected - actual).abs().max().item<double>(), kTolerance) << item.key();
  }
}

template <typename How>
class NormOverSlicesTest : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};
using Hows = ::testing::Types<ByPlan, ByLayers<Explicit>, ByLayers<Sequence>>;
TYPED_TEST_SUITE(NormOverSlicesTest, Hows);

TYPED_TEST(NormOverSlicesTest, IsThatOfTheWholeModuleAndClipsAsThere) {
  using How = TypeParam;
  const Trained whole = train_whole<How>();
  for (const int stage : {0, 1, 3}) {
    SCOPED_TRACE(c10::str("stage ", stage));
    on_grid([&](const Grid& grid) {
      auto model = wrap<How>(grid, stage);
      Optimizer<SGD> optimizer(model, momentum());
      for (int step = 0; step < kTrained; ++step) {
        optimizer.zero_grad();
        loss_on<How>(grid, model, step).backward();
        const GradientNorm by_group =
            gradient_norm(model, SGD(groups_of(*model.module()), momentum()));
        for (size_t group = 0; group < 2 && step == 0; ++group) {
          EXPECT_NEAR(by_group.of_group[group], whole.group_norms[group], kTolerance);
        }
        const ClippedNorm norm = clip_grad_norm_(model, kMostNorm);
        EXPECT_EQ(norm.before, by_group.total);
        EXPECT_NEAR(norm.before, whole.norms[static_cast<size_t>(step)], kTolerance);
        EXPECT_EQ(grid.all.min(norm.before), grid.all.max(norm.before)) << "the same bits";
        optimizer.step();
      }
      expect_trained_alike<How>(whole, grid, model);
    });
  }
}

TYPED_TEST(NormOverSlicesTest, SkipsTheStepOnAllRanksWhereAGradientOfOneIsNotFinite) {
  using How = TypeParam;
  const Trained whole = train_whole<How>();
  for (const int stage : {1, 3}) {
    SCOPED_TRACE(c10::str("stage ", stage));
    on_grid([&](const Grid& grid) {
      auto model = wrap<How>(grid, stage);
      Optimizer<SGD> optimizer(model, momentum());
      Accumulator accumulator(
          model, {.clip_norm = kMostNorm,
                  .loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024}});
      bool spoils = false;
      model.module()->up->weight.register_hook([&spoils](const torch::Tensor& gradient) {
        if (!spoils) return gradient;
        return own_slice(gradient).index_fill(0, torch::zeros({1}, torch::kLong),
                                              std::numeric_limits<double>::infinity());
      });
      const auto make_step = [&](int step) {
        accumulator.backward(loss_on<How>(grid, model, step));
        return accumulator.step(optimizer);
      };
      for (int step = 0; step < kTrained; ++step) {
        spoils = step == 1 && grid.all.rank() == 3;
        if (step == 1) {
          const StepReport skipped = make_step(step);
          EXPECT_EQ(skipped.skipped, Skipped::kNotFinite);
          EXPECT_THAT(skipped.not_finite, ElementsAre("up.weight"));
          EXPECT_EQ(skipped.next_loss_scale, 512);
          spoils = false;
        }
        const StepReport report = make_step(step);
        EXPECT_TRUE(report.stepped()) << report.to_string();
        EXPECT_NEAR(report.norm, whole.norms[static_cast<size_t>(step)], kTolerance);
      }
      EXPECT_EQ(optimizer.steps(), kTrained);
      expect_trained_alike<How>(whole, grid, model);
    });
  }
}

TEST(DocumentedShardsOverSlicesTest, NormsAreThoseOfWholeParameters) {
  std::map<std::string, double> norms;
  for (const auto& item : untrained()->named_parameters()) {
    norms[item.key()] = item.value().detach().norm().item<double>();
  }
  constexpr double kMost = 0.5;
  on_grid([&](const Grid& grid) {
    auto model = wrap<ByPlan>(grid, 1);
    std::map<std::string, torch::Tensor> before;
    int64_t slices = 0, capped = 0;
    visit_owned_shards(model, [&](const OwnedShard& shard) {
      before[shard.name] = shard.exact.clone();
      slices += shard.is_slice ? 1 : 0;
    });
    documented::cap_norms(model, kMost, &grid.tensor);
    visit_owned_shards(model, [&](const OwnedShard& shard) {
      const double norm = norms.at(shard.name), factor = norm > kMost ? kMost / norm : 1;
      capped += norm > kMost ? 1 : 0;
      EXPECT_TRUE(torch::allclose(shard.exact, before.at(shard.name) * factor)) << shard.name;
    });
    EXPECT_GT(slices, 0);
    EXPECT_GT(capped, slices / 2);
  });
}

TEST(AccumulatedSlicesTest, AreClippedByLibTorchByTheNormOfTheWholesMean) {
  const Trained whole = train_whole<ByPlan>();
  for (const int stage : {0, 1, 3}) {
    SCOPED_TRACE(c10::str("stage ", stage));
    on_grid([&](const Grid& grid) {
      auto model = wrap<ByPlan>(grid, stage);
      Optimizer<SGD> optimizer(model, momentum());
      Accumulator accumulator(model, {.micro_steps = 2});
      for (int step = 0; step < kTrained; ++step) {
        for (int twice = 0; twice < 2; ++twice) {
          accumulator.backward(loss_on<ByPlan>(grid, model, step));
        }
        const double norm = torch::nn::utils::clip_grad_norm_(model.parameters(), kMostNorm);
        EXPECT_NEAR(norm, whole.norms[static_cast<size_t>(step)], kTolerance);
        accumulator.step(optimizer);
      }
      expect_trained_alike<ByPlan>(whole, grid, model);
    });
  }
}

TEST(AgreementOverSlicesTest, OfWeightsRatesAndOptionsIsRequired) {
  on_grid([](const Grid& grid) {
    const auto of_two = [&](auto first, auto second) {
      return grid.tensor.rank() == 0 ? first : second;
    };
    auto model = wrap<ByPlan>(grid, 1);
    Optimizer<SGD> optimizer(model, momentum());
    Accumulator accumulator(model);
    accumulator.backward(loss_on<ByPlan>(grid, model, 0), of_two(1.0, 2.0));
    EXPECT_THAT(error_of([&] { accumulator.step(optimizer); }),
                HasSubstr("got 2 on rank 0 and 4 on rank 1"));
    accumulator.abandon();
    EXPECT_THAT(error_of([&] { Optimizer<SGD>(model, SGDOptions(of_two(0.1, 0.2))); }),
                HasSubstr("over the tensor-parallel group"));
    EXPECT_THAT(error_of([&] { Accumulator(model, {.clip_norm = of_two(1.0, 2.0)}); }),
                HasSubstr("over the tensor-parallel group"));
    EXPECT_THAT(error_of([&] { wrap<ByPlan>(grid, of_two(1, 3)); }),
                HasSubstr("over the tensor-parallel group"));
  });
}

TEST(AgreementOverSlicesTest, SlicesOfOneModuleAreOverOneWorld) {
  on_grid([](const Grid& grid) {
    torch::nn::Sequential net(
        parallel::ColumnParallelLinear(parallel::LinearOptions(4, 8), grid.tensor),
        parallel::ColumnParallelLinear(parallel::LinearOptions(4, 8), grid.data));
    World alone({.rank = 0, .world_size = 1, .local_world_size = 1, .launcher = "threads"},
                c10::make_intrusive<c10d::HashStore>());
    EXPECT_THAT(error_of([&] { DistributedDataParallel<torch::nn::Sequential>(net, alone); }),
                HasSubstr("\"0.weight\" and \"1.weight\" are slices over two worlds"));
  });
}

}  // namespace
}  // namespace zeropage::norm_over_slices_test
