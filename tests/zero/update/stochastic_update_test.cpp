#include "zero/update/stochastic_update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::stochastic_update_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::kBFloat16;
using torch::kFloat;
using torch::optim::Adagrad;
using torch::optim::AdagradOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kSteps = 4;

Oddball make_oddball() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Oddball();
}

Options stochastic(int stage = 1, UpdateBy update_by = UpdateBy::kClass) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  options.update_by = update_by;
  options.compute_dtype = kBFloat16;
  options.low_precision_update = LowPrecisionUpdate::kStochasticRounding;
  return options;
}

// Gradients that are the same on all ranks, and so for any number of them: fixed coefficients, which
// no kernel rounds by its number of threads. A new set in each step.
torch::Tensor coefficients_of(const torch::Tensor& parameter, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step + 1));
  return torch::randn(parameter.sizes(), generator).to(parameter.scalar_type());
}

template <typename Module>
torch::Tensor loss_with_coefficients(const Module& module, int step) {
  torch::Tensor loss = torch::zeros({});
  for (const torch::Tensor& parameter : distinct_parameters(module)) {
    if (!parameter.requires_grad()) continue;
    loss = loss + (parameter * coefficients_of(parameter, step)).sum().to(kFloat);
  }
  return loss;
}

struct Training {
  int ranks = 2;
  int threads = 1;
  Options options = stochastic();
};

// The whole weights after some steps, by rank 0.
template <typename A, typename Module>
std::vector<torch::Tensor> train(const Training& run, const std::function<Module()>& make,
                                 const typename OptimizerTraits<A>::Options& algorithm) {
  std::vector<torch::Tensor> result;
  run_ranks(run.ranks, [&](comm::World& world) {
    at::set_num_threads(run.threads);
    DistributedDataParallel<Module> model(make(), world, run.options);
    Optimizer<A> optimizer(model, algorithm);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      loss_with_coefficients(model.module(), step).backward();
      optimizer.step();
    }
    const auto state = full_state(model);
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

template <typename A>
void expect_same_bits_everywhere(const typename OptimizerTraits<A>::Options& algorithm) {
  for (const UpdateBy update_by : {UpdateBy::kClass, UpdateBy::kFused}) {
    const std::function<Oddball()> make = make_oddball;
    const auto expected =
        train<A>({.ranks = 1, .options = stochastic(0, update_by)}, make, algorithm);
    for (const int ranks : {1, 2, 3}) {
      for (const int stage : {0, 1, 2, 3}) {
        for (const int64_t page_bytes : {4_KiB, 256_KiB}) {
          Training run{.ranks = ranks, .options = stochastic(stage, update_by)};
          run.options.page_bytes = page_bytes;
          EXPECT_TRUE(same_bits(expected, train<A>(run, make, algorithm)))
              << ranks << " ranks, stage " << stage << ", pages of " << page_bytes << " bytes, "
              << (update_by == UpdateBy::kFused ? "fused" : "by class");
        }
      }
    }
  }
}

TEST(StochasticUpdateTest, HasTheSameBitsForAllStagesRanksAndPagesWithAdamW) {
  expect_same_bits_everywhere<AdamW>(AdamWOptions(0.01));
}
TEST(StochasticUpdateTest, HasTheSameBitsForAllStagesRanksAndPagesWithSgd) {
  expect_same_bits_everywhere<SGD>(SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
}
TEST(StochasticUpdateTest, HasTheSameBitsForAllStagesRanksAndPagesWithAdagrad) {
  expect_same_bits_everywhere<Adagrad>(AdagradOptions(0.05).initial_accumulator_value(0.1));
}

// Real samples have gradients that differ between ranks.
TEST(StochasticUpdateTest, HasTheSameBitsAtEveryStageOnSamplesOfRanks) {
  for (const int ranks : {2, 3}) {
    std::vector<torch::Tensor> expected;
    for (const int stage : {0, 1, 2, 3}) {
      run_ranks(ranks, [&](comm::World& world) {
        DistributedDataParallel<Oddball> model(make_oddball(), world, stochastic(stage));
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        for (int step = 0; step < kSteps; ++step) {
          const Samples samples = samples_of(world.rank(), step);
          optimizer.zero_grad();
          loss_of(model(samples.inputs), {{}, samples.targets.to(kBFloat16)}).backward();
          optimizer.step();
        }
        const auto state = full_state(model);
        if (world.rank() != 0) return;
        if (stage == 0) expected = state.values();
        EXPECT_TRUE(same_bits(expected, state.values())) << "stage " << stage;
      });
    }
  }
}

// Several tiles of the class and several chunks of kernels.
TEST(StochasticUpdateTest, HasTheSameBitsForAnyNumberOfThreads) {
  const std::function<torch::nn::Linear()> make = [] {
    torch::nn::Linear linear(500, 400);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : linear->parameters()) {
      parameter.copy_(torch::linspace(-1, 1, parameter.numel()).reshape(parameter.sizes()));
    }
    return linear;
  };
  for (const UpdateBy update_by : {UpdateBy::kClass, UpdateBy::kFused}) {
    const Options options = stochastic(1, update_by);
    const auto expected =
        train<AdamW>({.ranks = 1, .threads = 1, .options = options}, make, AdamWOptions(0.01));
    for (const int threads : {2, 3}) {
      for (const int ranks : {1, 2}) {
        const Training run{.ranks = ranks, .threads = threads, .options = options};
        EXPECT_TRUE(same_bits(expected, train<AdamW>(run, make, AdamWOptions(0.01))))
            << threads << " threads, " << ranks << " ranks";
      }
    }
  }
}

TEST(StochasticUpdateTest, RoundsByTheSeed) {
  const std::function<Oddball()> make = make_oddball;
  const auto with_seed = [&](uint64_t seed) {
    Training run;
    run.options.rounding_seed = seed;
    return train<SGD>(run, make, SGDOptions(0.05));
  };
  EXPECT_TRUE(same_bits(with_seed(0), with_seed(0)));
  EXPECT_FALSE(same_bits(with_seed(0), with_seed(1)));
  EXPECT_FALSE(same_bits(with_seed(0), with_seed(uint64_t{1} << 32)));
}

torch::nn::Linear linear_of_ones(int64_t size) {
  torch::nn::Linear linear(size, size);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) parameter.fill_(1.0);
  return linear;
}

class StochasticUpdateOfStageTest : public ::testing::TestWithParam<int> {
 protected:
  Options options(UpdateBy update_by = UpdateBy::kClass) const {
    return stochastic(GetParam(), update_by);
  }
};

TEST_P(StochasticUpdateOfStageTest, KeepsUpdatesThatAreTooSmallForTheParametersOnAverage) {
  constexpr double kExpected = 1 - 8.0 / 2048;
  for (const UpdateBy update_by : {UpdateBy::kClass, UpdateBy::kFused}) {
    run_ranks(2, [&](comm::World& world) {
      DistributedDataParallel<torch::nn::Linear> model(linear_of_ones(100), world,
                                                       options(update_by));
      // An eighth of the last place below 1.
      Optimizer<SGD> optimizer(model, SGDOptions(1.0 / 2048));
      for (int step = 0; step < 8; ++step) {
        optimizer.zero_grad();
        model->weight.sum().backward();
        optimizer.step();
      }
      const GatheredParameters whole(model);
      const torch::Tensor weight = model->weight.detach().to(torch::kDouble);
      // Four deviations of a mean of 10000.
      EXPECT_NEAR(weight.mean().item<double>(), kExpected, 4 * 0.0037 / 100);
      EXPECT_GT(weight.std().item<double>(), 0.001) << "at random, not all alike";
      EXPECT_TRUE(model->bias.eq(1).all().item<bool>());
    });
  }
}

TEST_P(StochasticUpdateOfStageTest, LosesThemWhereRoundedToNearest) {
  run_ranks(2, [&](comm::World& world) {
    Options nearest = options();
    nearest.low_precision_update = LowPrecisionUpdate::kNearest;
    DistributedDataParallel<torch::nn::Linear> model(linear_of_ones(20), world, nearest);
    Optimizer<SGD> optimizer(model, SGDOptions(1.0 / 2048));
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      model->weight.sum().backward();
      optimizer.step();
    }
    EXPECT_TRUE(model->weight.eq(1).all().item<bool>());
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, 0);
  });
}

TEST_P(StochasticUpdateOfStageTest, HasNoMasterWeights) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_oddball(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    loss_with_coefficients(model.module(), 0).backward();
    optimizer.step();
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, 0);
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kOptimizerState, 0);
    const zero::ShardedModel& sharded = sharded_parameters_of(model);
    for (size_t page = 0; page < sharded.pages->layouts().size(); ++page) {
      EXPECT_FALSE(sharded.masters->copy(page).defined());
    }
  });
}

TEST_P(StochasticUpdateOfStageTest, LeavesParametersWithoutAGradientBitForBit) {
  for (const UpdateBy update_by : {UpdateBy::kClass, UpdateBy::kFused}) {
    run_ranks(2, [&](comm::World& world) {
      DistributedDataParallel<Oddball> model(make_oddball(), world, options(update_by));
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.1));
      const auto step = [&](bool with_scale) {
        optimizer.zero_grad();
        torch::Tensor loss = model->first->weight.sum();
        if (with_scale) loss = loss + model->scale;
        loss.backward();
        optimizer.step();
        return full_state(model, world.rank());
      };
      const auto first = step(true);
      const auto second = step(false);
      EXPECT_TRUE(torch::equal(first["scale"], second["scale"]));
      EXPECT_FALSE(torch::equal(first["first.weight"], second["first.weight"]));
      const auto initial = make_oddball()->named_parameters();
      for (const char* untouched : {"unused.weight", "frozen.weight", "strided", "tied"}) {
        EXPECT_TRUE(torch::equal(second[untouched], initial[untouched].to(kBFloat16))) << untouched;
      }
    });
  }
}

TEST_P(StochasticUpdateOfStageTest, RoundsAParameterAlikeInWhateverGroupOrOptimizerItIs) {
  for (const UpdateBy update_by : {UpdateBy::kClass, UpdateBy::kFused}) {
    run_ranks(2, [&](comm::World& world) {
      using Groups = std::vector<torch::optim::OptimizerParamGroup>;
      const auto train = [&](const auto& make_optimizers) {
        DistributedDataParallel<torch::nn::Linear> model(linear_of_ones(20), world,
                                                         options(update_by));
        auto optimizers = make_optimizers(model);
        for (int step = 0; step < kSteps; ++step) {
          model.zero_grad();
          loss_with_coefficients(model.module(), step).backward();
          for (auto& optimizer : optimizers) optimizer->step();
        }
        return full_state(model, world.rank());
      };
      using Optimizers = std::vector<std::unique_ptr<torch::optim::Optimizer>>;
      const auto one = train([](auto& model) {
        Optimizers optimizers;
        optimizers.push_back(std::make_unique<Optimizer<AdamW>>(model, AdamWOptions(0.01)));
        return optimizers;
      });
      const auto groups = train([](auto& model) {
        Optimizers optimizers;
        optimizers.push_back(std::make_unique<Optimizer<AdamW>>(
            model, Groups{{{model->bias}}, {{model->weight}}}, AdamWOptions(0.01)));
        return optimizers;
      });
      EXPECT_TRUE(same_bits(one.values(), groups.values()));
      const auto slow_bias = train([](auto& model) {
        Optimizers optimizers;
        optimizers.push_back(std::make_unique<Optimizer<AdamW>>(
            model, Groups{{{model->bias}, std::make_unique<AdamWOptions>(0.0)}, {{model->weight}}},
            AdamWOptions(0.01)));
        return optimizers;
      });
      EXPECT_TRUE(torch::equal(slow_bias["weight"], one["weight"]));
      EXPECT_TRUE(slow_bias["bias"].eq(1).all().item<bool>()) << "a rate of zero changes nothing";
      EXPECT_FALSE(one["bias"].eq(1).all().item<bool>());
    });
  }
}

TEST_P(StochasticUpdateOfStageTest, HoldsFourBytesForEachElementOfOnePagesOwnedPart) {
  run_ranks(2, [&](comm::World& world) {
    torch::nn::Sequential net;
    for (int layer = 0; layer < 6; ++layer) net->push_back(torch::nn::Linear(100, 100));
    DistributedDataParallel<torch::nn::Sequential> model(net, world, options(UpdateBy::kFused));
    const zero::ShardedModel& sharded = sharded_parameters_of(model);
    const zero::ParameterPages& pages = *sharded.pages;
    ASSERT_GE(pages.layouts().size(), 6U);
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    const auto backward = [&] {
      optimizer.zero_grad();
      loss_with_coefficients(net, 0).backward();
    };
    backward();
    optimizer.step();
    backward();
    memory::Ledger& ledger = *memory::Ledger::current();
    sharded.paging->release_all("step()");
    ledger.reset_peak();
    const int64_t before = ledger.now().total();
    optimizer.step();
    int64_t largest = 0;
    for (size_t page = 0; page < pages.layouts().size(); ++page) {
      largest = std::max(largest, pages.owned(page).numel());
    }
    // And small tensors of collectives and of the check of gradients.
    EXPECT_PEAK_BYTES_LE(ledger, before + 4 * largest + 4_KiB);
    EXPECT_GE(ledger.at_peak().total(), before + 4 * largest) << "the part was not measured";
    EXPECT_LE(ledger.now().total(), before);
  });
}

// A layer norm that stays fp32 beside a linear layer that is rounded.
struct NormedImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({50})};
  torch::nn::Linear linear{50, 50};
  NormedImpl() {
    register_module("norm", norm);
    register_module("linear", linear);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(torch::linspace(-1, 1, parameter.numel()).reshape(parameter.sizes()));
    }
  }
};
TORCH_MODULE(Normed);

TEST_P(StochasticUpdateOfStageTest, LeavesFp32PagesToThePlainClass) {
  Normed plain;
  AdamW plain_optimizer(plain->norm->parameters(), AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    plain_optimizer.zero_grad();
    loss_with_coefficients(plain->norm, step).backward();
    plain_optimizer.step();
  }
  run_ranks(2, [&](comm::World& world) {
    Options mixed = options();
    mixed.stays_fp32 = ModuleSelection::of_type<torch::nn::LayerNorm>();
    DistributedDataParallel<Normed> model(Normed(), world, mixed);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      loss_with_coefficients(model.module(), step).backward();
      optimizer.step();
    }
    EXPECT_EQ(model->linear->weight.scalar_type(), kBFloat16);
    EXPECT_EQ(model->norm->weight.scalar_type(), kFloat);
    EXPECT_TRUE(same_bits(plain->norm->parameters(), model->norm->parameters()));
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, StochasticUpdateOfStageTest, ::testing::Values(0, 1, 2, 3));

TEST(StochasticUpdateTest, TakesAModuleThatIsInBfloat16Already) {
  run_ranks(1, [](comm::World& world) {
    auto linear = linear_of_ones(20);
    linear->to(kBFloat16);
    Options options = stochastic();
    options.compute_dtype.reset();
    DistributedDataParallel<torch::nn::Linear> model(linear, world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(1.0 / 1024));
    model->weight.sum().backward();
    optimizer.step();
    const auto rounded_down = model->weight.ne(1).sum().item<int64_t>();
    EXPECT_GT(rounded_down, 50) << "of 400, a quarter";
    EXPECT_LT(rounded_down, 150);
  });
}

TEST(StochasticUpdateTest, IsRefusedForAModuleInHalf) {
  run_ranks(1, [](comm::World& world) {
    auto linear = linear_of_ones(3);
    linear->to(torch::kHalf);
    Options options = stochastic();
    options.compute_dtype.reset();
    DistributedDataParallel<torch::nn::Linear> model(linear, world, options);
    EXPECT_THAT(
        error_of([&] { Optimizer<SGD> optimizer(model, SGDOptions(0.1)); }),
        HasSubstr("kStochasticRounding is for bfloat16, but page \"weight .. bias\" is half; use "
                  "LowPrecisionUpdate::kMasterWeights"));
  });
}

}  // namespace
}  // namespace zeropage::stochastic_update_test
