// What sharded gradients and parameters mean to a script: the module behaves as a plain one.
#include <cstring>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::sharded_parameters_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kSteps = 5;

template <typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Small pages, so that a tiny module has several.
Options at_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.update_by = UpdateBy::kClass;  // whose bits a plain run has
  options.page_bytes = 4_KiB;
  return options;
}

template <typename Module>
Module make() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(13);
  return Module();
}

// Three linear layers of about a page each.
struct ThreeLayersImpl : torch::nn::Module {
  ThreeLayersImpl() {
    for (auto* layer : {&first, &second, &third}) {
      *layer =
          register_module("layer" + std::to_string(children().size()), torch::nn::Linear(30, 30));
    }
    in = register_module("input", torch::nn::Linear(7, 30));
    out = register_module("output", torch::nn::Linear(30, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return out(torch::tanh(third(torch::tanh(second(torch::tanh(first(in(x))))))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, in{nullptr}, out{nullptr};
};
TORCH_MODULE(ThreeLayers);

// Trains `ranks` ranks with `backward`, which gets a module either way, and compares with plain
// LibTorch.
template <typename Module>
void expect_parity(int ranks, const Options& options,
                   std::function<void(int, int, Module&)> backward = nullptr) {
  if (!backward) {
    backward = [](int rank, int step, Module& module) {
      const Samples samples = samples_of(rank, step);
      loss_of(module->forward(samples.inputs), samples).backward();
    };
  }
  at::set_num_threads(1);
  const auto expected = train_reference<Module>(
      ranks, kSteps, make<Module>,
      [](std::vector<torch::Tensor> parameters) {
        return std::make_unique<AdamW>(std::move(parameters), AdamWOptions(0.01));
      },
      backward);
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Module> model(make<Module>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      backward(world.rank(), step, model.module());
      optimizer.step();
    }
    EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
  });
}

// ---- the same bits, however pages come and go ----

struct PagingCase {
  std::string name;
  Options options;

  friend std::ostream& operator<<(std::ostream& out, const PagingCase& shown) {
    return out << shown.name;
  }
};

class PagingParityTest : public ::testing::TestWithParam<PagingCase> {};

TEST_P(PagingParityTest, HoldsForEveryModule) {
  for (const int ranks : {1, 2, 3}) {
    expect_parity<ThreeLayers>(ranks, GetParam().options);
    expect_parity<Transformer>(ranks, GetParam().options);
    expect_parity<Oddball>(ranks, GetParam().options);
  }
}

std::vector<PagingCase> paging_cases() {
  std::vector<PagingCase> cases;
  const auto add = [&](const std::string& name, auto change) {
    PagingCase added{name, at_stage(3)};
    change(added.options);
    cases.push_back(added);
  };
  add("Default", [](Options&) {});
  add("NoPrefetch", [](Options& options) { options.prefetch_bytes = 0; });
  add("FarPrefetch", [](Options& options) {
    options.prefetch_bytes = 1 << 20;
    options.parameter_budget_bytes = 1 << 20;
  });
  add("TwoPages", [](Options& options) { options.parameter_budget_bytes = 16_KiB; });
  add("AfterBackward", [](Options& options) { options.reshard = Reshard::kAfterBackward; });
  add("AfterStep", [](Options& options) { options.reshard = Reshard::kAfterStep; });
  add("SmallPagesWhole", [](Options& options) { options.minimum_sharded_bytes = 4_KiB; });
  add("AllWhole", [](Options& options) { options.minimum_sharded_bytes = 1 << 30; });
  add("WholeGradients",
      [](Options& options) { options.stage = {.optimizer_state = true, .parameters = true}; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Options, PagingParityTest, ::testing::ValuesIn(paging_cases()),
                         [](const auto& info) { return info.param.name; });

class ShardedTest : public ::testing::TestWithParam<int> {
 protected:
  Options options() const { return at_stage(GetParam()); }
};

TEST_P(ShardedTest, AModuleMayBeCalledNeverOnceOrThreeTimesInAStep) {
  expect_parity<ThreeLayers>(2, options(), [](int rank, int step, ThreeLayers& module) {
    const Samples samples = samples_of(rank, step);
    auto x = module->in(samples.inputs);
    for (int call = 0; call < (step % 3 == 2 ? 3 : step % 3); ++call)
      x = torch::tanh(module->second(x));
    loss_of(module->out(x), samples).backward();
  });
}

TEST_P(ShardedTest, ControlFlowMayChangeFromStepToStep) {
  expect_parity<ThreeLayers>(2, options(), [](int rank, int step, ThreeLayers& module) {
    const Samples samples = samples_of(rank, step);
    auto x = module->in(samples.inputs);
    if (step % 2 == 0) {
      x = module->first(torch::tanh(module->third(x)));
    } else {
      x = module->second(torch::tanh(module->first(x)));
    }
    loss_of(module->out(x), samples).backward();
  });
}

TEST_P(ShardedTest, ParametersMayBeUsedOutsideTheirModule) {
  expect_parity<ThreeLayers>(2, options(), [](int rank, int step, ThreeLayers& module) {
    const Samples samples = samples_of(rank, step);
    auto loss = loss_of(module->forward(samples.inputs), samples);
    for (const auto& parameter : module->parameters()) loss = loss + 1e-3 * parameter.pow(2).sum();
    loss.backward();
  });
}

TEST_P(ShardedTest, GradientsOfGradientsAreRight) {
  expect_parity<ThreeLayers>(2, options(), [](int rank, int step, ThreeLayers& module) {
    Samples samples = samples_of(rank, step);
    samples.inputs.requires_grad_();
    const auto outputs = module->forward(samples.inputs);
    const auto slope =
        torch::autograd::grad({outputs.pow(2).sum()}, {samples.inputs, module->first->weight}, {},
                              /*retain_graph=*/true, /*create_graph=*/true);
    (loss_of(outputs, samples) + slope[0].pow(2).sum() + slope[1].pow(2).sum()).backward();
  });
}

TEST_P(ShardedTest, FrozenLayersStayAsTheyAreAndAdaptersTrain) {
  struct AdaptedImpl : torch::nn::Module {
    AdaptedImpl() {
      base = register_module("base", ThreeLayers());
      for (auto& parameter : base->parameters()) parameter.requires_grad_(false);
      down = register_module("down", torch::nn::Linear(7, 2));
      up = register_module("up", torch::nn::Linear(2, 7));
    }
    torch::Tensor forward(const torch::Tensor& x) { return base(x) + up(down(x)); }
    ThreeLayers base{nullptr};
    torch::nn::Linear down{nullptr}, up{nullptr};
  };
  struct Adapted : torch::nn::ModuleHolder<AdaptedImpl> {
    using torch::nn::ModuleHolder<AdaptedImpl>::ModuleHolder;
  };
  expect_parity<Adapted>(2, options());
}

TEST_P(ShardedTest, EvaluationBetweenStepsChangesNothing) {
  const auto expected = [&] {
    at::set_num_threads(1);
    return train_reference<ThreeLayers>(
        2, kSteps, make<ThreeLayers>, [](std::vector<torch::Tensor> parameters) {
          return std::make_unique<AdamW>(std::move(parameters), AdamWOptions(0.01));
        });
  }();
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options());
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const Samples samples = samples_of(world.rank(), step);
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
      model.eval();
      const auto trained = model(samples.inputs).detach().clone();
      {
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(model(samples.inputs), trained));
      }
      {
        const c10::InferenceMode inference;
        EXPECT_TRUE(torch::equal(model(samples.inputs), trained));
      }
      model.train();
    }
    const GatheredParameters guard(model);
    EXPECT_TRUE(same_bits(expected, model.parameters()));
  });
}

TEST_P(ShardedTest, ClippingTheGradientNormGivesTheBitsOfWholeGradients) {
  const auto weights_at = [](int stage) {
    std::vector<torch::Tensor> weights;
    std::mutex mutex;
    run_ranks(3, [&](comm::World& world) {
      DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, at_stage(stage));
      Optimizer<SGD> optimizer(model, SGDOptions(0.5));
      for (int step = 0; step < kSteps; ++step) {
        optimizer.zero_grad();
        const Samples samples = samples_of(world.rank(), step);
        loss_of(model(samples.inputs), samples).backward();
        torch::nn::utils::clip_grad_norm_(model.parameters(), 0.01);
        optimizer.step();
      }
      const GatheredParameters guard(model);
      if (world.rank() != 2) return;
      std::lock_guard lock(mutex);
      for (const auto& parameter : model.parameters()) {
        weights.push_back(parameter.detach().clone());
      }
    });
    return weights;
  };
  EXPECT_TRUE(same_bits(weights_at(0), weights_at(GetParam())));
}

TEST_P(ShardedTest, AGradientMayBeReplacedBeforeTheStep) {
  run_ranks(2, [&](comm::World& world) {
    torch::nn::Linear linear(torch::nn::LinearOptions(7, 7).bias(false));
    DistributedDataParallel<torch::nn::Linear> model(linear, world, options());
    {
      const torch::NoGradGuard no_grad;
      model->weight.zero_();
    }
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    model(torch::ones({1, 7})).sum().backward();
    model->weight.mutable_grad() = torch::full({7, 7}, -3.0);
    optimizer.step();
    EXPECT_TRUE(model->weight.eq(3).all().item<bool>());
  });
}

TEST_P(ShardedTest, SeveralModelsLiveInOneProcess) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> one(make<ThreeLayers>(), world, options());
    auto two = std::make_unique<DistributedDataParallel<ThreeLayers>>(make<ThreeLayers>(), world,
                                                                      options());
    Optimizer<SGD> of_one(one, SGDOptions(0.1));
    auto of_two = std::make_unique<Optimizer<SGD>>(*two, SGDOptions(0.1));
    const Samples samples = samples_of(world.rank(), 0);
    for (int step = 0; step < 3; ++step) {
      loss_of(one(samples.inputs), samples).backward();
      of_one.step();
      of_one.zero_grad();
      loss_of((*two)(samples.inputs), samples).backward();
      of_two->step();
      of_two->zero_grad();
    }
    EXPECT_TRUE(torch::equal(one(samples.inputs), (*two)(samples.inputs)));
    two.reset();
    of_two.reset();
    one(samples.inputs).sum().backward();
    of_one.step();
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ShardedTest, ::testing::Values(2, 3));

// ---- guards, at every stage ----

class GuardTest : public ::testing::TestWithParam<int> {
 protected:
  Options options() const { return at_stage(GetParam()); }
};

float* memory_of(const torch::Tensor& tensor) {
  return static_cast<float*>(tensor.data_ptr());
}

TEST_P(GuardTest, ShowsWholeParametersToWhatReadsMemory) {
  run_ranks(2, [&](comm::World& world) {
    const auto plain = make<ThreeLayers>();
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options());
    EXPECT_EQ(model->third->weight.data_ptr() == nullptr, options().stage.parameters);
    {
      const GatheredParameters guard(model, {model->third->weight});
      EXPECT_EQ(0, std::memcmp(memory_of(model->third->weight), memory_of(plain->third->weight),
                               plain->third->weight.nbytes()));
    }
    const GatheredParameters all(model);
    for (const auto& parameter : plain->named_parameters()) {
      const auto whole = model.named_parameters()[parameter.key()];
      EXPECT_EQ(0, std::memcmp(memory_of(whole), memory_of(parameter.value()), whole.nbytes()));
    }
  });
}

TEST_P(GuardTest, GivesAllRanksWhatOneRankWrote) {
  run_ranks(3, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options());
    {
      const GatheredParameters guard(model, {model->first->bias}, Modified::on_rank(1));
      std::fill_n(memory_of(model->first->bias), 30, 10.0F + static_cast<float>(world.rank()));
    }
    EXPECT_TRUE(model->first->bias.eq(11).all().item<bool>());
    EXPECT_TRUE(torch::equal(model->first->weight, make<ThreeLayers>()->first->weight));
  });
}

TEST_P(GuardTest, KeepsWhatEveryRankWrote) {
  run_ranks(3, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options());
    {
      const GatheredParameters guard(model, Modified::on_every_rank());
      for (const auto& parameter : model.parameters()) {
        std::fill_n(memory_of(parameter), parameter.numel(), 4.0F);
      }
    }
    for (const auto& parameter : model.parameters()) {
      EXPECT_TRUE(parameter.eq(4).all().item<bool>());
    }
  });
}

TEST_P(GuardTest, KeepsWhatOperatorsWriteWithoutAGuard) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options());
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.parameters()) torch::nn::init::constant_(parameter, 2);
    for (const auto& parameter : model.parameters()) {
      EXPECT_TRUE(parameter.eq(2).all().item<bool>());
    }
  });
}

TEST_P(GuardTest, ShowsWholeMeanGradientsToWhatReadsMemory) {
  run_ranks(3, [&](comm::World& world) {
    torch::nn::Linear linear(torch::nn::LinearOptions(7, 7).bias(false));
    DistributedDataParallel<torch::nn::Linear> model(linear, world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    EXPECT_THAT(error_of([&] { GatheredGradients guard(model); }), HasSubstr("no_sync"));
    model(torch::full({1, 7}, 1.0 * world.rank())).sum().backward();  // 0, 1, 2
    {
      const GatheredGradients guard(model);
      const float* gradient = memory_of(model->weight.grad());
      ASSERT_NE(gradient, nullptr);
      for (int element = 0; element < 49; ++element) ASSERT_EQ(gradient[element], 1.0F);
    }
    optimizer.step();
    EXPECT_EQ(options().stage.optimizer_state, model->weight.grad().data_ptr() == nullptr);
  });
}

TEST_P(GuardTest, GathersTheFullStateOnOneRank) {
  run_ranks(3, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make<Oddball>(), world, options());
    const auto plain = make<Oddball>();
    const auto state = full_state(model, /*rank=*/1);
    if (world.rank() != 1) {
      EXPECT_TRUE(state.is_empty());
      return;
    }
    EXPECT_EQ(state.size(), plain->named_parameters().size() + plain->named_buffers().size());
    for (const auto& parameter : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(state[parameter.key()], parameter.value())) << parameter.key();
    }
    EXPECT_TRUE(state["tied"].is_same(state["last.weight"]));
    EXPECT_TRUE(state.contains("steps"));
  });
}

TEST_P(GuardTest, LetsTorchSaveWriteTheModule) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options());
    std::stringstream file;
    if (options().stage.parameters) {
      EXPECT_THROW(torch::save(model.module(), file), c10::Error) << "outside of a guard";
      file = {};
    }
    {
      const GatheredParameters guard(model);
      torch::save(model.module(), file);
    }
    const auto plain = make<ThreeLayers>();
    auto loaded = make<ThreeLayers>();
    for (const auto& parameter : loaded->parameters()) parameter.detach().zero_();
    torch::load(loaded, file);
    EXPECT_TRUE(same_bits(plain->parameters(), loaded->parameters()));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, GuardTest, ::testing::Values(0, 1, 2, 3));

// ---- what is moved ----

TEST(ShardedTrafficTest, PagesAreGatheredAsOftenAsReshardSays) {
  const auto gathers_a_step = [](Reshard reshard) {
    int64_t gathers = 0;
    run_ranks(2, [&](comm::World& world) {
      Options options = at_stage(3);
      options.reshard = reshard;
      DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options);
      Optimizer<SGD> optimizer(model, SGDOptions(0.1));
      memory::PagingStatistics before;
      for (int step = 0; step < 3; ++step) {
        before = model.paging();
        for (int micro = 0; micro < 2; ++micro) {
          const Samples samples = samples_of(world.rank(), step);
          loss_of(model(samples.inputs), samples).backward();
        }
        optimizer.step();
        optimizer.zero_grad();
      }
      const memory::PagingStatistics step = model.paging() - before;
      if (world.rank() == 0) gathers = step.faults + step.prefetched;
    });
    return gathers;
  };
  const int64_t pages = 3;  // in + first, second, third + out, or alike
  const int64_t after_step = gathers_a_step(Reshard::kAfterStep);
  EXPECT_GE(after_step, pages);
  EXPECT_EQ(gathers_a_step(Reshard::kAfterBackward), 2 * after_step);
  EXPECT_GT(gathers_a_step(Reshard::kAfterUse), 2 * after_step);
}

TEST(ShardedTrafficTest, AfterTheFirstStepPagesComeBeforeTheyAreAskedFor) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, at_stage(3));
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      const memory::PagingStatistics before = model.paging();
      const Samples samples = samples_of(world.rank(), step);
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
      optimizer.zero_grad();
      const memory::PagingStatistics in_step = model.paging() - before;
      EXPECT_EQ(in_step.evictions, in_step.faults + in_step.prefetched);
      if (step == 0) {
        EXPECT_EQ(in_step.prefetched, 0);
        EXPECT_GT(in_step.faults, 3);
      } else {
        EXPECT_EQ(in_step.faults, 1) << "the first page of a step has nothing before it";
        EXPECT_GT(in_step.prefetched, 2);
      }
    }
  });
}

// ---- bad input ----

TEST(ShardedErrorTest, RefusesABudgetBelowOnePage) {
  run_ranks(2, [](comm::World& world) {
    Options options = at_stage(3);
    options.parameter_budget_bytes = 3'000;
    EXPECT_THAT(error_of([&] {
                  DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options);
                }),
                ::testing::AllOf(HasSubstr("page \"layer0\" has"),
                                 HasSubstr("options.parameter_budget_bytes is 2.9 KiB")));
  });
}

TEST(ShardedErrorTest, RefusesAnOperatorThatNeedsMoreThanTheBudget) {
  run_ranks(2, [](comm::World& world) {
    Options options = at_stage(3);
    options.parameter_budget_bytes = 10_KiB;
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options);
    const std::vector<torch::Tensor> weights = {model->first->weight, model->second->weight,
                                                model->third->weight};
    EXPECT_THAT(error_of([&] { torch::stack(weights); }),
                ::testing::AllOf(HasSubstr("aten::stack needs parameter pages \"layer0\""),
                                 HasSubstr("options.parameter_budget_bytes is 10.0 KiB"),
                                 HasSubstr("raise it to at least")));
    const Samples samples = samples_of(world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
  });
}

TEST(ShardedErrorTest, RefusesWhatWouldTakeParametersOutOfTheirPages) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, at_stage(3));
    EXPECT_THAT(error_of([&] { model->to(torch::kFloat64); }),
                ::testing::AllOf(HasSubstr("->to()"), HasSubstr("before wrapping")));
    EXPECT_THAT(error_of([&] {
                  model->first->weight.set_data(torch::zeros({30, 30}));
                }),
                HasSubstr("set_data()"));
    EXPECT_THAT(error_of([&] {
                  const torch::NoGradGuard no_grad;
                  model->first->weight.resize_({2});
                }),
                HasSubstr("resize_"));
    EXPECT_THAT(error_of([&] { model->first->clone(); }), HasSubstr("GatheredParameters"));
    const Samples samples = samples_of(world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
    const GatheredParameters guard(model);
    EXPECT_TRUE(torch::equal(model->first->clone()->parameters()[0], model->first->weight));
  });
}

TEST(ShardedErrorTest, NoticesAModuleThatGotOtherParameters) {
  run_ranks(1, [](comm::World& world) {
    for (const int stage : {0, 3}) {
      torch::nn::Sequential net(torch::nn::Linear(7, 7));
      DistributedDataParallel<torch::nn::Sequential> model(net, world, at_stage(stage));
      net->push_back(torch::nn::Linear(7, 7));
      EXPECT_THAT(error_of([&] {
                    model(torch::ones({1, 7}));
                  }),
                  HasSubstr("\"1.weight\" was registered or replaced after"));
    }
  });
}

TEST(ShardedErrorTest, RefusesToShardWhatSomethingElseHolds) {
  run_ranks(2, [](comm::World& world) {
    auto module = make<ThreeLayers>();
    auto view = module->second->weight[3];
    EXPECT_THAT(
        error_of([&] { DistributedDataParallel<ThreeLayers> model(module, world, at_stage(3)); }),
        ::testing::AllOf(HasSubstr("\"layer1.weight\": something else holds its memory"),
                         HasSubstr("before wrapping")));
    EXPECT_TRUE(torch::equal(module->second->weight, make<ThreeLayers>()->second->weight));
    view.reset();
    DistributedDataParallel<ThreeLayers> model(module, world, at_stage(3));
  });
}

TEST(ShardedErrorTest, RefusesToWrapWhatIsShardedAlready) {
  run_ranks(1, [](comm::World& world) {
    auto module = make<ThreeLayers>();
    auto model = std::make_unique<DistributedDataParallel<ThreeLayers>>(module, world, at_stage(3));
    EXPECT_THAT(
        error_of([&] { DistributedDataParallel<ThreeLayers> again(module, world, at_stage(0)); }),
        HasSubstr("is wrapped already"));
    model.reset();
    EXPECT_THAT(
        error_of([&] { DistributedDataParallel<ThreeLayers> again(module, world, at_stage(3)); }),
        HasSubstr("is sharded by another DistributedDataParallel"));
  });
}

TEST(ShardedErrorTest, ARefusalLeavesTheModuleAsItWas) {
  run_ranks(2, [](comm::World& world) {
    auto module = make<ThreeLayers>();
    Options options = at_stage(3);
    options.parameter_budget_bytes = 3'000;
    EXPECT_THROW(DistributedDataParallel<ThreeLayers>(module, world, options), c10::Error);
    EXPECT_TRUE(same_bits(make<ThreeLayers>()->parameters(), module->parameters()));
    EXPECT_NE(module->second->weight.data_ptr(), nullptr);
  });
}

TEST(ShardedErrorTest, GuardsLeaveNoMorePagesThanTheyFound) {
  for (const Reshard reshard : {Reshard::kAfterUse, Reshard::kAfterStep}) {
    run_ranks(2, [&](comm::World& world) {
      Options options = at_stage(3);
      options.reshard = reshard;
      DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options);
      const paging::Pager& pager = *sharded_parameters_of(model).paging->pager();
      {
        const GatheredParameters guard(model);
        EXPECT_GT(pager.resident_bytes(), 2 * pager.largest_page_bytes());
      }
      EXPECT_EQ(pager.resident_bytes(), 0);
      visit_parameters(model, [&](const std::string&, const torch::Tensor&) {
        EXPECT_LE(pager.resident_bytes(), pager.largest_page_bytes());
      });
      EXPECT_EQ(pager.resident_bytes(), 0);
      const int64_t gathers = model.paging().faults;
      full_state(model);
      const auto pages = sharded_parameters_of(model).pages->layouts().size();
      EXPECT_EQ(model.paging().faults - gathers, static_cast<int64_t>(pages)) << "each page once";
    });
  }
}

TEST(ShardedErrorTest, RefusesAStepWhileAGuardIsOpen) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, at_stage(3));
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    const Samples samples = samples_of(world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
    {
      const GatheredParameters guard(model);
      EXPECT_THAT(error_of([&] { optimizer.step(); }), HasSubstr("let the guard"));
    }
    optimizer.step();
  });
}

TEST(ShardedErrorTest, RefusesStagesTwoAndThreeForBareParameters) {
  run_ranks(1, [](comm::World& world) {
    for (const int stage : {2, 3}) {
      torch::nn::Linear linear(3, 3);
      EXPECT_THAT(error_of([&] {
                    Optimizer<SGD> optimizer(linear->parameters(), world, SGDOptions(0.1),
                                             at_stage(stage));
                  }),
                  HasSubstr("need zeropage::DistributedDataParallel"));
    }
  });
}

TEST(ShardedErrorTest, RefusesPagingOptionsAtStagesWithoutPaging) {
  run_ranks(1, [](comm::World& world) {
    Options options = at_stage(2);
    options.parameter_budget_bytes = 1 << 20;
    EXPECT_THAT(error_of([&] {
                  DistributedDataParallel<ThreeLayers> model(make<ThreeLayers>(), world, options);
                }),
                HasSubstr("use stage 3 or leave them out"));
  });
}

}  // namespace
}  // namespace zeropage::sharded_parameters_test
