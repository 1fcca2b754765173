// Optimizer state, gradients and parameters away from the device: the same bits, the bytes that the
// formula says and no others, right under slow links, and refusals in words.
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/zeropage.h"

namespace zeropage::offload_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Tier;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using memory::operator""_MiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 4;

using Folder = DiskFolder;

template <typename Module>
Module make() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Module();
}

std::vector<torch::Tensor> values_of(const DistributedDataParallelBase& model) {
  std::vector<torch::Tensor> values;
  visit_parameters(model, [&](const std::string&, const torch::Tensor& parameter) {
    values.push_back(parameter.clone());
  });
  return values;
}

using EachStep = std::function<void(int step, DistributedDataParallelBase& model)>;

// Rank 0's parameters after some steps.
template <typename Module, typename A = AdamW>
std::vector<torch::Tensor> trained(int ranks, const Options& options,
                                   const typename OptimizerTraits<A>::Options& algorithm,
                                   const EachStep& each_step = {}) {
  std::vector<torch::Tensor> result;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Module> model(make<Module>(), world, options);
    Optimizer<A> optimizer(model, algorithm);
    for (int step = 0; step < kSteps; ++step) {
      const Samples samples = samples_of(world.rank(), step);
      optimizer.zero_grad();
      loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
      optimizer.step();
      if (each_step) each_step(step, model);
    }
    const auto values = values_of(model);
    if (world.rank() == 0) result = values;
  });
  return result;
}

Options at_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  return options;
}

Options offloaded(Options options, Tier optimizer, const Folder& folder) {
  options.offload.optimizer = optimizer;
  if (optimizer == Tier::kNvme) options.offload.nvme_directory = folder.path();
  return options;
}

class OffloadParityTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  int stage() const { return std::get<1>(GetParam()); }

  // Every way to offload gives the bits of none.
  template <typename Module, typename A = AdamW>
  void expect_parity(const Options& plain,
                     const typename OptimizerTraits<A>::Options& algorithm) const {
    const Folder folder;
    const auto expected = trained<Module, A>(ranks(), plain, algorithm);
    const auto expect_same = [&](const Options& options, const std::string& what) {
      EXPECT_TRUE(same_bits(expected, trained<Module, A>(ranks(), options, algorithm))) << what;
    };
    for (const Tier optimizer : {Tier::kHost, Tier::kNvme}) {
      Options options = offloaded(plain, optimizer, folder);
      expect_same(options, c10::str(name(optimizer)));
      options.offload.step = StepWhen::kInBackward;
      expect_same(options, c10::str(name(optimizer), ", in backward"));
      if (stage() != 3) continue;
      options.offload.parameters = optimizer;
      expect_same(options, c10::str(name(optimizer), ", parameters too, in backward"));
      options.offload.step = StepWhen::kInStep;
      expect_same(options, c10::str(name(optimizer), ", parameters too"));
    }
    EXPECT_TRUE(folder.empty());
  }
};

TEST_P(OffloadParityTest, OfFp32Parameters) {
  expect_parity<Transformer>(at_stage(stage()), AdamWOptions(0.01));
  expect_parity<Oddball>(at_stage(stage()), AdamWOptions(0.01));
}

TEST_P(OffloadParityTest, OfBfloat16ParametersAndOtherClasses) {
  Options options = at_stage(stage());
  options.compute_dtype = torch::kBFloat16;
  expect_parity<Transformer>(options, AdamWOptions(0.01));
  expect_parity<Oddball>(options, AdamWOptions(0.01));
  options.accumulate_dtype = torch::kBFloat16;
  expect_parity<Transformer, torch::optim::SGD>(options,
                                                torch::optim::SGDOptions(0.01).momentum(0.9));
}

INSTANTIATE_TEST_SUITE_P(RanksStages, OffloadParityTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3)));

class OffloadTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, OffloadTest, ::testing::Values(0, 1, 2, 3));

TEST_P(OffloadTest, AddsUpMicroStepsOnTheDeviceAndSendsEachGradientDownOnce) {
  const auto train = [&](const Options& options, int64_t* bytes_down) {
    std::vector<torch::Tensor> result;
    run_ranks(2, [&](comm::World& world) {
      DistributedDataParallel<Transformer> model(make<Transformer>(), world, options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      Accumulator accumulator(model, {.micro_steps = 3});
      for (int micro_step = 0; micro_step < 3 * kSteps; ++micro_step) {
        const Samples samples = samples_of(world.rank(), micro_step);
        accumulator.backward(loss_of(model(samples.inputs), samples));
        if (micro_step % 3 == 2) accumulator.step(optimizer);
      }
      if (world.rank() == 0 && bytes_down != nullptr) {
        *bytes_down = sharded_parameters_of(model).pages->page_offload()->copies().bytes(
            offload::Direction::kToHost);
      }
      const auto values = values_of(model);
      if (world.rank() == 0) result = values;
    });
    return result;
  };
  const Folder folder;
  const auto expected = train(at_stage(GetParam()), nullptr);
  for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
    Options options = offloaded(at_stage(GetParam()), Tier::kHost, folder);
    options.offload.step = when;
    int64_t bytes_down = 0;
    EXPECT_TRUE(same_bits(expected, train(options, &bytes_down)));
    int64_t owned_bytes = 0;
    run_ranks(2, [&](comm::World& world) {
      DistributedDataParallel<Transformer> model(make<Transformer>(), world, at_stage(GetParam()));
      const zero::ParameterPages& pages = *sharded_parameters_of(model).pages;
      if (world.rank() != 0) return;
      for (size_t page = 0; page < pages.layouts().size(); ++page) {
        owned_bytes += 4 * pages.owned(page).numel();
      }
    });
    EXPECT_EQ(bytes_down, kSteps * owned_bytes);
  }
}

TEST_P(OffloadTest, TakesOverWhatIsWrittenToParametersBetweenSteps) {
  const Folder folder;
  const EachStep halve = [](int step, DistributedDataParallelBase& model) {
    if (step != 1) return;
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.parameters()) parameter.mul_(0.5);
  };
  const auto expected = trained<Transformer>(2, at_stage(GetParam()), AdamWOptions(0.01), halve);
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    const Options options = offloaded(at_stage(GetParam()), tier, folder);
    EXPECT_TRUE(same_bits(expected, trained<Transformer>(2, options, AdamWOptions(0.01), halve)));
  }
}

TEST_P(OffloadTest, GradientsMayBeClippedAndLookedAt) {
  const auto train = [&](const Options& options) {
    std::vector<torch::Tensor> result;
    run_ranks(2, [&](comm::World& world) {
      DistributedDataParallel<Transformer> model(make<Transformer>(), world, options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      for (int step = 0; step < kSteps; ++step) {
        const Samples samples = samples_of(world.rank(), step);
        optimizer.zero_grad();
        loss_of(model(samples.inputs), samples).backward();
        clip_grad_norm_(model, 0.1);
        if (GetParam() >= 2) {
          EXPECT_GT(model.parameters().front().grad().abs().sum().item<float>(), 0);
        }
        optimizer.step();
      }
      const auto values = values_of(model);
      if (world.rank() == 0) result = values;
    });
    return result;
  };
  const Folder folder;
  EXPECT_TRUE(same_bits(train(at_stage(GetParam())),
                        train(offloaded(at_stage(GetParam()), Tier::kHost, folder))));
}

TEST_P(OffloadTest, PartOfThePagesMayLeave) {
  const Folder folder;
  const auto expected = trained<Transformer>(2, at_stage(GetParam()), AdamWOptions(0.01));
  Options options = offloaded(at_stage(GetParam()), Tier::kHost, folder);
  options.offload.optimizer_bytes = 40_KiB;
  EXPECT_TRUE(same_bits(
      expected, trained<Transformer>(
                    2, options, AdamWOptions(0.01), [](int, DistributedDataParallelBase& model) {
                      const memory::Ledger& ledger = *memory::Ledger::current();
                      EXPECT_GT(ledger.offloaded(Tier::kHost)[Kind::kOptimizerState], 0);
                      EXPECT_LE(ledger.offloaded(Tier::kHost).total(), 40_KiB);
                      EXPECT_GT(ledger.now()[Kind::kOptimizerState], 0);
                      EXPECT_TRUE(sharded_parameters_of(model).pages->page_offload() != nullptr);
                    })));
}

TEST_P(OffloadTest, HoldsWhatTheFormulaSaysAndNothingOnTheDevice) {
  const Folder folder;
  const int stage = GetParam();
  run_ranks(2, [&](comm::World& world) {
    for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
      Options options = offloaded(at_stage(stage), tier, folder);
      if (stage == 3) options.offload.parameters = tier;
      torch::nn::Sequential net(torch::nn::Linear(256, 256), torch::nn::ReLU(),
                                torch::nn::Linear(256, 256));
      DistributedDataParallel<torch::nn::Sequential> model(net, world, options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        model->forward(torch::ones({2, 256})).sum().backward();
        optimizer.step();
      }
      const double bytes = 4.0 * (2 * 256 * 257) / (stage > 0 ? 2 : 1);
      const memory::Ledger& ledger = *memory::Ledger::current();
      const memory::Breakdown host = ledger.offloaded(Tier::kHost);
      const memory::Breakdown away = ledger.offloaded(tier);
      const auto expect_about = [&](int64_t held, double expected, const char* what) {
        EXPECT_LE(static_cast<double>(held), 1.02 * expected) << what;
        EXPECT_GE(static_cast<double>(held), 0.98 * expected) << what;
      };
      expect_about(away[Kind::kOptimizerState], 2 * bytes, "states");
      expect_about(away[Kind::kMasterWeights] + away[Kind::kParameter], bytes, "values");
      expect_about(host[Kind::kGradient], bytes, "gradients");
      EXPECT_EQ(host[Kind::kStaging], 0);
      const memory::Breakdown device = ledger.now();
      EXPECT_EQ(device[Kind::kOptimizerState], 0);
      EXPECT_EQ(device[Kind::kMasterWeights], 0);
      EXPECT_EQ(device[Kind::kBucket], 0);
      if (stage >= 2) {
        EXPECT_EQ(device[Kind::kGradient], 0);
      }
      if (stage == 3) {
        EXPECT_EQ(device[Kind::kParameter], 0);
      }
    }
    EXPECT_EQ(memory::Ledger::current()->offloaded(Tier::kHost).total(), 0);
    EXPECT_EQ(memory::Ledger::current()->offloaded(Tier::kNvme).total(), 0);
  });
}

TEST_P(OffloadTest, IsRightOverASlowLink) {
  const Folder folder;
  const auto expected = trained<Transformer>(2, at_stage(GetParam()), AdamWOptions(0.01));
  for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
    Options options = offloaded(at_stage(GetParam()), Tier::kHost, folder);
    options.offload.step = when;
    options.offload.link_bytes_per_second = 4 * 1024 * 1024;
    if (GetParam() == 3) options.offload.parameters = Tier::kHost;
    EXPECT_TRUE(same_bits(expected, trained<Transformer>(2, options, AdamWOptions(0.01))));
  }
}

// Step t takes the gradients of the parameters that step t - 1 was given: the first changes nothing.
TEST_P(OffloadTest, OneStepLateIsThePlainUpdateWithParametersOneStepOld) {
  const Folder folder;
  Options options = offloaded(at_stage(GetParam()), Tier::kHost, folder);
  options.offload.step = StepWhen::kOneStepLate;
  run_ranks(2, [&](comm::World& world) {
    torch::nn::Linear net(7, 7);
    torch::nn::init::constant_(net->weight, 0.5);
    torch::nn::init::constant_(net->bias, 0.25);
    torch::Tensor weight = net->weight.detach().clone();
    torch::Tensor bias = net->bias.detach().clone();
    DistributedDataParallel<torch::nn::Linear> model(net, world, options);
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.5));
    // The same on all ranks, so that the mean is each one's own.
    std::vector<torch::Tensor> next = {weight, bias};
    for (int step = 0; step < kSteps; ++step) {
      const Samples samples = samples_of(0, step);
      optimizer.zero_grad();
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
      // By hand: the gradient at the parameters that forward saw, applied to the newest.
      auto w = weight.clone().requires_grad_();
      auto b = bias.clone().requires_grad_();
      loss_of(torch::linear(samples.inputs, w, b), samples).backward();
      weight = next[0];
      bias = next[1];
      next = {next[0] - 0.5 * w.grad(), next[1] - 0.5 * b.grad()};
      const auto now = values_of(model);
      EXPECT_TRUE(torch::allclose(now[0], weight, 1e-5, 1e-6)) << "step " << step;
      EXPECT_TRUE(torch::allclose(now[1], bias, 1e-5, 1e-6)) << "step " << step;
    }
  });
}

enum class After : uint8_t { kDropped, kZeroed };

// A few milliseconds of updates, of which the last weight's is the last.
std::vector<torch::Tensor> trained_late(int stage, After after) {
  std::vector<torch::Tensor> result;
  run_ranks(1, [&](comm::World& world) {
    torch::nn::Sequential net;
    for (uint64_t layer = 0; layer < 24; ++layer) {
      const torch::nn::Linear linear(512, 512);
      const torch::NoGradGuard no_grad;
      linear->weight.copy_(
          torch::randn({512, 512}, at::detail::createCPUGenerator(layer)).mul_(0.04));
      linear->bias.zero_();
      net->push_back(linear);
    }
    Options options = at_stage(stage);
    options.page_bytes = 1_MiB;
    options.offload.optimizer = Tier::kHost;
    options.offload.step = StepWhen::kOneStepLate;
    DistributedDataParallel<torch::nn::Sequential> model(net, world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      model->forward(torch::full({2, 512}, 0.1 * (step + 1))).square().mean().backward();
      optimizer.step();
      // The update reads them meanwhile.
      auto parameters = model.parameters();
      if (after == After::kZeroed) {
        for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) it->grad().zero_();
      } else {
        optimizer.zero_grad();
      }
    }
    const auto state = full_state(model);
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

TEST(LateStepTest, ReadsGradientsThatAreZeroedMeanwhileAsTheyWere) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_TRUE(
        same_bits(trained_late(stage, After::kDropped), trained_late(stage, After::kZeroed)))
        << "stage " << stage;
  }
}

template <typename A = AdamW>
std::string refusal_of(Options options,
                       const typename OptimizerTraits<A>::Options& algorithm = {0.01}) {
  std::string words;
  run_ranks(1, [&](comm::World& world) {
    words = error_of([&] {
      DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 3), world, options);
      Optimizer<A> optimizer(model, algorithm);
      model->forward(torch::ones({1, 3})).sum().backward();
      optimizer.step();
    });
  });
  return words;
}

TEST(OffloadErrorTest, SaysWhatCannotBeOffloadedAndWhatToDo) {
  Options options = at_stage(2);
  options.offload.parameters = Tier::kHost;
  EXPECT_THAT(refusal_of(options), HasSubstr("keeps parameters whole on the device; use stage 3"));
  options.stage = Stage::kParameters;
  EXPECT_THAT(refusal_of(options), HasSubstr("set options.offload.optimizer too"));
  options.offload.optimizer = Tier::kHost;
  options.offload.step = StepWhen::kOneStepLate;
  EXPECT_THAT(refusal_of(options), HasSubstr("would read offloaded parameters meanwhile"));
  options = at_stage(1);
  options.offload.optimizer = Tier::kHost;
  options.offload.step = StepWhen::kOneStepLate;
  options.offload.optimizer_bytes = 64_KiB;
  EXPECT_THAT(refusal_of(options), HasSubstr("would be a step ahead of what leaves it"));
  options = at_stage(1);
  options.offload.optimizer = Tier::kHost;
  EXPECT_EQ(refusal_of(options), "");
  EXPECT_THAT(refusal_of<torch::optim::RMSprop>(options), HasSubstr("has no fused form"));
  options.update_by = UpdateBy::kClass;
  EXPECT_THAT(refusal_of(options), HasSubstr("options.update_by is UpdateBy::kClass"));
  options = at_stage(1);
  options.offload.step = StepWhen::kInBackward;
  EXPECT_THAT(refusal_of(options), HasSubstr("is about offloaded optimizer state"));
  options.offload.optimizer = Tier::kNvme;
  EXPECT_THAT(refusal_of(options), HasSubstr("expected a folder on a local disk"));
  options.offload.nvme_directory = "/no/such/folder";
  EXPECT_THAT(refusal_of(options), HasSubstr("/no/such/folder"));
  options.offload.nvme_directory = "/dev/shm";
  EXPECT_THAT(refusal_of(options), HasSubstr("tmpfs"));
}

TEST(OffloadErrorTest, OneOptimizerAloneFollowsBackward) {
  for (const StepWhen when : {StepWhen::kInBackward, StepWhen::kOneStepLate}) {
    Options options = at_stage(2);
    options.offload.optimizer = Tier::kHost;
    options.offload.step = when;
    run_ranks(1, [&](comm::World& world) {
      DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 3), world, options);
      {
        const Optimizer<AdamW> first(model, AdamWOptions(0.01));
        EXPECT_THAT(error_of([&] { Optimizer<AdamW>(model, AdamWOptions(0.01)); }),
                    HasSubstr("another optimizer of this model follows backward already"));
      }
      const Optimizer<AdamW> after(model, AdamWOptions(0.01));
    });
  }
}

// Each weight is a page.
struct ThreePagesImpl : torch::nn::Module {
  ThreePagesImpl() {
    for (const char* name : {"first", "middle", "last"}) {
      layers.push_back(
          register_module(name, torch::nn::Linear(torch::nn::LinearOptions(40, 40).bias(false))));
    }
  }
  torch::Tensor forward(const torch::Tensor& x, bool detached_use = false) {
    torch::Tensor y = layers[0](x);
    if (detached_use) y = y.matmul(layers[2]->weight.detach());
    return layers[2](layers[1](y));
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(ThreePages);

Options stepping_in_backward() {
  Options options = at_stage(1);
  options.offload.optimizer = Tier::kHost;
  options.offload.step = StepWhen::kInBackward;
  return options;
}

std::vector<torch::Tensor> trained_with_an_added_group(StepWhen when) {
  std::vector<torch::Tensor> result;
  run_ranks(1, [&](comm::World& world) {
    Options options = stepping_in_backward();
    options.offload.step = when;
    DistributedDataParallel<ThreePages> model(make<ThreePages>(), world, options);
    const auto& layers = model->layers;
    const torch::optim::SGDOptions of_all(0.1);
    const auto group = [&](std::vector<torch::Tensor> parameters) {
      return torch::optim::OptimizerParamGroup(std::move(parameters),
                                               std::make_unique<torch::optim::SGDOptions>(of_all));
    };
    Optimizer<torch::optim::SGD> optimizer(
        model, ShardedOptimizer::Groups{group({layers[0]->weight, layers[1]->weight})}, of_all);
    for (int step = 0; step < 3; ++step) {
      model(torch::ones({2, 40})).sum().backward();
      optimizer.step();
      model.zero_grad();
      if (step == 0) {
        optimizer.add_param_group(group({layers[2]->weight}));
      }
    }
    result = values_of(model);
  });
  return result;
}

TEST(StepInBackwardTest, UpdatesAGroupThatWasAddedBeforeTheBackward) {
  const auto expected = trained_with_an_added_group(StepWhen::kInStep);
  EXPECT_TRUE(same_bits(expected, trained_with_an_added_group(StepWhen::kInBackward)));
}

TEST(OffloadErrorTest, AnOptimizerWhoseConstructorThrowsLeavesNothingBehind) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<ThreePages> model(make<ThreePages>(), world, stepping_in_backward());
    const double rate = world.rank() == 0 ? 0.1 : 0.2;
    EXPECT_THAT(error_of([&] { const Optimizer<torch::optim::SGD> optimizer(model, rate); }),
                HasSubstr("rank 0 has group 0 lr: 0.1; rank 1 has group 0 lr: 0.2"));
    Optimizer<torch::optim::SGD> optimizer(model, 0.1);
    model(torch::ones({2, 40})).sum().backward();
    optimizer.step();
  });
}

TEST(OffloadErrorTest, ADetachedUseOfWhatBackwardHasUpdatedIsRefused) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    DistributedDataParallel<ThreePages> model(make<ThreePages>(), world, stepping_in_backward());
    Optimizer<torch::optim::SGD> optimizer(model, 0.1);
    model(torch::ones({2, 40}), /*detached_use=*/true).sum().backward();
  });
  EXPECT_THAT(message_of(errors[0]), HasSubstr("modified by an inplace operation"));
}

TEST(OffloadErrorTest, AWriteBetweenABackwardThatMadeTheStepAndStepIsRefused) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    DistributedDataParallel<ThreePages> model(make<ThreePages>(), world, stepping_in_backward());
    Optimizer<torch::optim::SGD> optimizer(model, 0.1);
    model(torch::ones({2, 40})).sum().backward();
    {
      const torch::NoGradGuard no_grad;
      model->layers[1]->weight.clamp_(-0.01, 0.01);
    }
    optimizer.step();
  });
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("parameter \"middle.weight\" was written to between backward()"));
}

TEST(OffloadErrorTest, AWriteWhileAStepOneLateIsUnderWayIsRefused) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    Options options = stepping_in_backward();
    options.offload.step = StepWhen::kOneStepLate;
    DistributedDataParallel<ThreePages> model(make<ThreePages>(), world, options);
    Optimizer<torch::optim::SGD> optimizer(model, 0.1);
    double value = 0;
    const auto write_and_step = [&] {
      model->layers[1]->weight.data().fill_(value += 0.01);
      optimizer.zero_grad();
      model(torch::ones({2, 40})).sum().backward();
      optimizer.step();
    };
    EXPECT_EQ(error_of(write_and_step), "") << "nothing is under way yet";
    write_and_step();
  });
  EXPECT_THAT(message_of(errors[0]), HasSubstr("write before the first step"));
}

TEST(OffloadErrorTest, AStepInBackwardAllowsNoChangeOfGradientsAfterIt) {
  Options options = at_stage(2);
  options.offload.optimizer = Tier::kHost;
  options.offload.step = StepWhen::kInBackward;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Transformer> model(make<Transformer>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const Samples samples = samples_of(world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
    EXPECT_THAT(error_of([&] { clip_grad_norm_(model, 1e-3); }),
                HasSubstr("which has made the step with them already"));
    EXPECT_THAT(error_of([&] { Accumulator(model, {.clip_norm = 1.0}); }),
                HasSubstr("use StepWhen::kInStep"));
    optimizer.step();
  });
}

}  // namespace
}  // namespace zeropage::offload_test
