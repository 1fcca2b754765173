// What a saved state has, what is refused, and what a load may be asked for.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "saving/detail/state_saving.h"
#include "state/run_token.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"
#include "zeropage/saved_state.h"

namespace zeropage::sharded_state_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

const AdamWOptions kAdamW = AdamWOptions(0.01);

// A wrapped module and its optimizer, on one of some ranks.
template <typename Module, typename A = AdamW>
struct Trained {
  Trained(comm::World& world, int stage, const typename OptimizerTraits<A>::Options& algorithm,
          const Options& options = {})
      : model(make<Module>(), world, Setting{stage, world.size(), options}.all()),
        optimizer(model, algorithm) {}

  void train(int steps) {
    for (int step = 0; step < steps; ++step) train_step(model, optimizer, step);
  }
  std::vector<torch::Tensor> values() {
    std::vector<torch::Tensor> result;
    visit_parameters(model, [&](const std::string&, const torch::Tensor& values) {
      result.push_back(values.clone());
    });
    return result;
  }

  DistributedDataParallel<Module> model;
  Optimizer<A> optimizer;
};

class ShardedStateTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return disk_.path() + "/" + name; }
  // A state of Oddball after two steps.
  std::string save_oddball(const std::string& name = "step-2") const {
    run_ranks(2, [&](comm::World& world) {
      Trained<Oddball> run(world, 3, kAdamW);
      run.train(2);
      save_state(path(name), run.model, run.optimizer);
    });
    return path(name);
  }
  static void flip_a_bit(const std::string& file, int64_t byte) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(byte);
    const auto old = static_cast<char>(stream.get());
    stream.seekp(byte);
    stream.put(static_cast<char>(old ^ 4));
  }

  const DiskFolder disk_;
};

// ---- what is frozen ----

struct TwoWidePagesImpl : torch::nn::Module {
  TwoWidePagesImpl() {
    first = register_module("first", torch::nn::Linear(70, 70));
    second = register_module("second", torch::nn::Linear(70, 70));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoWidePages);

// Made while its second layer is frozen.
struct PartlyFrozen {
  PartlyFrozen(comm::World& world, int stage, const Options& options)
      : model(make<TwoWidePages>(), world, Setting{stage, world.size(), options}.all()),
        optimizer((freeze(true), model), kAdamW) {}

  void freeze(bool frozen) {
    for (torch::Tensor parameter : model->second->parameters()) parameter.requires_grad_(!frozen);
  }
  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      model(torch::full({2, 70}, 0.1 * (1 + step + model.world().rank()))).pow(2).sum().backward();
      optimizer.step();
    }
  }
  std::vector<torch::Tensor> values() {
    std::vector<torch::Tensor> result;
    visit_parameters(model, [&](const std::string&, const torch::Tensor& values) {
      result.push_back(values.clone());
    });
    return result;
  }
  static int64_t state_bytes() {
    const auto& ledger = *memory::Ledger::current();
    return ledger.now()[memory::Kind::kOptimizerState] +
           ledger.offloaded(memory::Tier::kHost)[memory::Kind::kOptimizerState];
  }

  DistributedDataParallel<TwoWidePages> model;
  Optimizer<AdamW> optimizer;
};

TEST_F(ShardedStateTest,
       WhatIsFrozenWhenTheOptimizerIsMadeHasNoStatesUntilItStepsAndGoesOnWithThem) {
  Options small, host;
  small.optimizer_state = StateFormat::k8Bit;
  host.offload.optimizer = memory::Tier::kHost;
  for (const Options& options : {Options(), small, host}) {
    for (const int stage : {1, 3}) {
      run_ranks(2, [&](comm::World& world) {
        PartlyFrozen run(world, stage, options);
        const int64_t frozen_bytes = PartlyFrozen::state_bytes();
        run.train(0, 2);
        save_state(path("frozen"), run.model, run.optimizer);
        EXPECT_EQ(PartlyFrozen::state_bytes(), frozen_bytes) << "saving makes none either";
        run.freeze(false);
        run.train(2, 4);
        EXPECT_EQ(PartlyFrozen::state_bytes(), 2 * frozen_bytes);
        save_state(path("unfrozen"), run.model, run.optimizer);
        run.train(4, 6);

        PartlyFrozen again(world, stage, options);
        load_state(path("unfrozen"), again.model, again.optimizer);
        again.freeze(false);
        again.train(4, 6);
        EXPECT_TRUE(same_bits(run.values(), again.values()));

        PartlyFrozen earlier(world, stage, options);
        load_state(path("frozen"), earlier.model, earlier.optimizer);
        earlier.freeze(false);
        earlier.train(2, 6);
        EXPECT_TRUE(same_bits(run.values(), earlier.values()));
      });
    }
  }
}

// ---- what is in it ----

TEST_F(ShardedStateTest, HasEveryParameterAndBufferUnderItsNameAndTiedOnesAsAliases) {
  const state::SavedState saved(save_oddball());
  std::set<std::string> names;
  for (const auto& entry : saved.weights().header().tensors) names.insert(entry.name);
  EXPECT_THAT(names,
              ElementsAre("empty", "first.bias", "first.weight", "frozen.bias", "frozen.weight",
                          "scale", "steps", "strided", "tied", "unused.bias", "unused.weight"));
  // The largest elements first, so that each tensor is aligned: the buffer of int64 before all.
  uint64_t largest = 8;
  for (const auto& entry : saved.weights().header().tensors) {
    EXPECT_LE(state::size_of(entry.dtype), largest) << entry.name;
    largest = state::size_of(entry.dtype);
  }
  EXPECT_EQ(largest, 4U);
  const auto& metadata = saved.weights().header().metadata;
  EXPECT_EQ(metadata.at("last.weight"), "tied");
  EXPECT_EQ(metadata.at("format"), "pt");
  EXPECT_EQ(saved.weights().find("strided")->shape, (std::vector<uint64_t>{11, 13}));
  EXPECT_EQ(saved.optimizer()->find("first.weight:exp_avg")->shape,
            saved.weights().find("first.weight")->shape);
  EXPECT_EQ(saved.manifest().step, 2);
}

TEST_F(ShardedStateTest, HasTensorsInRowMajorOrderWhateverTheirStrides) {
  const state::SavedState saved(save_oddball());
  run_ranks(1, [&](comm::World& world) {
    Trained<Oddball> run(world, 0, kAdamW);
    load_weights(saved.directory(), run.model);
    const auto* const entry = saved.weights().find("strided");
    torch::Tensor read = torch::empty({11, 13});
    state::BlockReader(saved.weights())
        .read(entry->begin, entry->end, static_cast<char*>(read.mutable_data_ptr()));
    EXPECT_FALSE(run.model->strided.is_contiguous());
    EXPECT_TRUE(torch::equal(read, run.model->strided.detach()));
  });
}

// A mask that the module keeps expanded.
struct MaskedImpl : torch::nn::Module {
  MaskedImpl() {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    mask = register_buffer("mask", torch::zeros({3, 1}).expand({3, 4}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x) + mask; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor mask;
};
TORCH_MODULE(Masked);

TEST_F(ShardedStateTest, HasBuffersThatAreExpandedAndRanksTakeThoseOfRank0) {
  const auto masks = torch::tensor({1.0F, 2.0F, 3.0F}).view({3, 1}).expand({3, 4});
  run_ranks(2, [&](comm::World& world) {
    const auto module = make<Masked>();
    module->mask.narrow(1, 0, 1).add_(masks.narrow(1, 0, 1) * (1 + world.rank()));
    DistributedDataParallel<Masked> model(module, world);
    Optimizer<AdamW> optimizer(model, kAdamW);
    EXPECT_TRUE(torch::equal(model->mask, masks));
    save_state(path("state"), model, optimizer);
    module->mask.narrow(1, 0, 1).zero_();
    load_state(path("state"), model, optimizer);
    EXPECT_TRUE(torch::equal(model->mask, masks));
    module->mask.narrow(1, 0, 1).zero_();
    load_weights(path("state"), model);
    EXPECT_TRUE(torch::equal(model->mask, masks));
  });
}

// By operators, outside of any step; at stage 3 the page that has it is dirty.
TEST_F(ShardedStateTest, HasWhatWasWrittenToParametersSinceTheStep) {
  for (const int stage : {0, 3}) {
    for (const bool low_precision : {false, true}) {
      SCOPED_TRACE(c10::str("stage ", stage, low_precision ? " in bf16" : ""));
      Options options;
      if (low_precision) options.compute_dtype = torch::kBFloat16;
      run_ranks(2, [&](comm::World& world) {
        Trained<Oddball> run(world, stage, kAdamW, options);
        run.train(1);
        {
          const torch::NoGradGuard no_grad;
          run.model->first->weight.fill_(0.75);
        }
        save_state(path("step-1"), run.model, run.optimizer);
        Trained<Oddball> other(world, 1, kAdamW);
        load_state(path("step-1"), other.model, other.optimizer);
        const auto values = full_state(other.model);
        if (world.rank() != 0) return;
        EXPECT_TRUE(torch::equal(values["first.weight"], torch::full({13, 7}, 0.75)));
      });
    }
  }
}

// ---- what a load refuses ----

TEST_F(ShardedStateTest, OfAnotherModelIsRefusedWithEveryNameAndNothingChanges) {
  const std::string saved = save_oddball();
  run_ranks(2, [&](comm::World& world) {
    Trained<Transformer> run(world, 1, kAdamW);
    const auto before = run.values();
    const std::string error =
        zeropage::testing::error_of([&] { load_state(saved, run.model, run.optimizer); });
    EXPECT_THAT(error, HasSubstr("missing in it: blocks.0.in_proj_bias"));
    EXPECT_THAT(error, HasSubstr("unexpected: empty, first.bias"));
    EXPECT_THAT(error, HasSubstr("LoadOptions::strict"));
    EXPECT_TRUE(same_bits(before, run.values()));
  });
}

struct NarrowImpl : torch::nn::Module {
  NarrowImpl() { first = register_module("first", torch::nn::Linear(7, 12)); }
  torch::Tensor forward(const torch::Tensor& x) { return first(x).narrow(1, 0, 7); }
  torch::nn::Linear first{nullptr};
};
TORCH_MODULE(Narrow);

TEST_F(ShardedStateTest, AnotherShapeIsRefusedEvenWhereNotAllMustBeThere) {
  const std::string saved = save_oddball();
  run_ranks(1, [&](comm::World& world) {
    Trained<Narrow> run(world, 0, kAdamW);
    const auto before = run.values();
    const std::string error =
        zeropage::testing::error_of([&] { load_weights(saved, run.model, {.strict = false}); });
    EXPECT_THAT(error, HasSubstr("weights.safetensors: byte"));
    EXPECT_THAT(error, HasSubstr("expected \"first.weight\" of [12, 7], got [13, 7]"));
    EXPECT_TRUE(same_bits(before, run.values()));
  });
}

TEST_F(ShardedStateTest, OfAnotherOptimizerIsRefusedAndItsWeightsAreNot) {
  const std::string saved = save_oddball();
  run_ranks(1, [&](comm::World& world) {
    Trained<Oddball, torch::optim::Adagrad> run(world, 0, torch::optim::AdagradOptions(0.1));
    EXPECT_THAT(zeropage::testing::error_of([&] { load_state(saved, run.model, run.optimizer); }),
                HasSubstr("expected the state of torch::optim::Adagrad, got that of "
                          "torch::optim::AdamW; use load_weights()"));
    load_weights(saved, run.model);
  });
}

TEST_F(ShardedStateTest, OfWeightsAloneIsNoStateOfAnOptimizer) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    save_weights(path("step-0"), run.model);
    EXPECT_THAT(
        zeropage::testing::error_of([&] { load_state(path("step-0"), run.model, run.optimizer); }),
        HasSubstr("got weights alone; use load_weights()"));
    EXPECT_THAT(load_weights(path("step-0"), run.model).missing, IsEmpty());
  });
}

TEST_F(ShardedStateTest, ThatIsDamagedIsRefusedOnAllRanksBeforeAnythingChanges) {
  const std::string saved = save_oddball();
  flip_a_bit(saved + "/optimizer.safetensors", 5000);
  run_ranks(3, [&](comm::World& world) {
    Trained<Oddball> run(world, 3, kAdamW);
    const auto before = run.values();
    const std::string error =
        zeropage::testing::error_of([&] { load_state(saved, run.model, run.optimizer); });
    EXPECT_THAT(error, HasSubstr("optimizer.safetensors: byte 0: expected the block of"));
    EXPECT_TRUE(same_bits(before, run.values()));
  });
}

struct LargeImpl : torch::nn::Module {
  LargeImpl() { first = register_module("first", torch::nn::Linear(7, 100'000)); }
  torch::nn::Linear first{nullptr};
};
TORCH_MODULE(Large);

// Far behind the headers.
TEST_F(ShardedStateTest, IsLookedAtAsAWholeBeforeAnythingChanges) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Large> run(world, 3, kAdamW);
    save_state(path("step-0"), run.model, run.optimizer);
    world.communicator().barrier("the damage").wait();
    if (world.rank() == 0) flip_a_bit(path("step-0/optimizer.safetensors"), 5'000'000);
    world.communicator().barrier("the load").wait();
    Trained<Large> other(world, 1, kAdamW);
    {
      const torch::NoGradGuard no_grad;
      other.model->first->weight.fill_(2);
    }
    const auto before = other.values();
    const auto load = [&](bool verify_first) {
      return zeropage::testing::error_of([&] {
        load_state(path("step-0"), other.model, other.optimizer, {.verify_first = verify_first});
      });
    };
    EXPECT_THAT(load(true), HasSubstr("optimizer.safetensors: byte 4194304: expected the block"));
    EXPECT_TRUE(same_bits(before, other.values()));
    EXPECT_THAT(load(false), HasSubstr("the model is half loaded"));
  });
}

TEST_F(ShardedStateTest, ThatWasLoadedEndsGraphsFromBefore) {
  const std::string saved = save_oddball();
  run_ranks(1, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    const Samples samples = samples_of(0, 0);
    const torch::Tensor loss = loss_of(run.model(samples.inputs), samples);
    load_state(saved, run.model, run.optimizer);
    EXPECT_THAT(zeropage::testing::error_of([&] { loss.backward(); }),
                HasSubstr("modified by an inplace operation"));
  });
}

TEST_F(ShardedStateTest, BeforeADamagedOneIsLoadedWhereThatIsAskedFor) {
  save_oddball("step-2");
  const auto before = files_of(path("step-2"));
  const std::string newer = save_oddball("step-3");
  flip_a_bit(newer + "/weights.safetensors", 5000);
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 2, kAdamW);
    EXPECT_THAT(
        zeropage::testing::error_of([&] { load_state(disk_.path(), run.model, run.optimizer); }),
        HasSubstr("step-3"));
    const LoadReport report =
        load_state(disk_.path(), run.model, run.optimizer, {.fall_back = true});
    EXPECT_EQ(report.directory.filename(), "step-2");
    ASSERT_EQ(report.notes.size(), 1U);
    EXPECT_THAT(report.notes.front(), HasSubstr("step-3/weights.safetensors"));
    save_state(path("again/step-2"), run.model, run.optimizer);
  });
  EXPECT_TRUE(files_of(path("again/step-2")) == before);
}

// ---- what may be asked for ----

struct RenamedImpl : torch::nn::Module {
  RenamedImpl() {
    entry = register_module("entry", torch::nn::Linear(7, 13));
    extra = register_parameter("extra", torch::full({3}, 5.0));
  }
  torch::Tensor forward(const torch::Tensor& x) { return entry(x).narrow(1, 0, 7) * extra.sum(); }
  torch::nn::Linear entry{nullptr};
  torch::Tensor extra;
};
TORCH_MODULE(Renamed);

TEST_F(ShardedStateTest, UnderOtherNamesAndInPartIsLoadedAndTheReportSaysWhatWasNot) {
  const std::string saved = save_oddball();
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> source(world, 1, kAdamW);
    load_weights(saved, source.model);
    Trained<Renamed> run(world, 3, kAdamW);
    const LoadReport report =
        load_state(saved, run.model, run.optimizer,
                   {.strict = false,
                    .names = {{"entry.weight", "first.weight"}, {"entry.bias", "first.bias"}}});
    EXPECT_THAT(report.missing, ElementsAre("extra", "extra:step"));
    EXPECT_THAT(report.unexpected, ::testing::Contains("strided"));
    const auto values = full_state(run.model);
    const auto expected = full_state(source.model);
    if (world.rank() != 0) return;
    EXPECT_TRUE(torch::equal(values["extra"], torch::full({3}, 5.0)));
    EXPECT_TRUE(torch::equal(values["entry.weight"], expected["first.weight"]));
    EXPECT_TRUE(torch::equal(values["entry.bias"], expected["first.bias"]));
  });
}

TEST_F(ShardedStateTest, InLowPrecisionGivesAnFp32RunTheMasterWeights) {
  std::vector<torch::Tensor> masters;
  Options bf16;
  bf16.compute_dtype = torch::kBFloat16;
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 2, kAdamW, bf16);
    run.train(3);
    save_state(path("step-3"), run.model, run.optimizer);
  });
  const state::SavedState saved(path("step-3"));
  EXPECT_EQ(saved.weights().find("first.weight")->dtype, state::Dtype::kBF16);
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 3, kAdamW);
    load_state(path("step-3"), run.model, run.optimizer);
    const auto* const entry = saved.optimizer()->find("first.weight:master");
    torch::Tensor master = torch::empty({13, 7});
    state::BlockReader(*saved.optimizer())
        .read(entry->begin, entry->end, static_cast<char*>(master.mutable_data_ptr()));
    GatheredParameters guard(run.model);
    EXPECT_TRUE(torch::equal(run.model->first->weight.detach(), master));
    EXPECT_FALSE(torch::equal(master, master.to(torch::kBFloat16).to(torch::kFloat)));
  });
}

// Matrices and vectors of an Oddball in two groups, in either order.
struct Grouped {
  Grouped(comm::World& world, bool vectors_first)
      : model(make<Oddball>(), world, Setting{1, world.size(), {}}.all()),
        optimizer(model, groups_of(model, vectors_first), AdamWOptions()) {}

  static ShardedOptimizer::Groups groups_of(const DistributedDataParallel<Oddball>& model,
                                            bool vectors_first) {
    std::vector<torch::Tensor> matrices, vectors;
    for (const auto& parameter : model.parameters()) {
      (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
    }
    ShardedOptimizer::Groups groups;
    groups.emplace_back(matrices, std::make_unique<AdamWOptions>(0.25));
    groups.emplace_back(vectors, std::make_unique<AdamWOptions>(0.5));
    if (vectors_first) std::swap(groups[0], groups[1]);
    return groups;
  }
  AdamWOptions& options(size_t group) {
    return static_cast<AdamWOptions&>(optimizer.param_groups()[group].options());
  }

  DistributedDataParallel<Oddball> model;
  Optimizer<AdamW> optimizer;
};

TEST_F(ShardedStateTest, FindsGroupsByTheirParametersWhateverTheirOrder) {
  run_ranks(2, [&](comm::World& world) {
    Grouped saved(world, false);
    save_state(path("step-0"), saved.model, saved.optimizer);
    Grouped loaded(world, true);
    for (const size_t group : {0, 1}) loaded.options(group).lr(1);
    const auto report =
        load_state(path("step-0"), loaded.model, loaded.optimizer, {.optimizer_options = false});
    EXPECT_THAT(report.notes,
                ::testing::Contains("parameter group 0 has other options than the state: lr 0.5, "
                                    "now 1.0"));
    EXPECT_EQ(loaded.options(0).lr(), 1);
    load_state(path("step-0"), loaded.model, loaded.optimizer);
    EXPECT_EQ(loaded.options(0).lr(), 0.5);
    EXPECT_EQ(loaded.options(1).lr(), 0.25);
  });
}

TEST_F(ShardedStateTest, RefusesAGroupWhoseParametersHadDifferentOptionsBeforeItLoadsAnything) {
  run_ranks(2, [&](comm::World& world) {
    Grouped saved(world, false);
    save_state(path("step-0"), saved.model, saved.optimizer);
    DistributedDataParallel<Oddball> model(make<Oddball>(), world,
                                           Setting{1, world.size(), {}}.all());
    const auto all = model.parameters();
    ShardedOptimizer::Groups groups;
    groups.emplace_back(std::vector<torch::Tensor>(all.begin(), all.begin() + 3));
    groups.emplace_back(std::vector<torch::Tensor>(all.begin() + 3, all.end()));
    Optimizer<AdamW> optimizer(model, groups, AdamWOptions(0.125));
    EXPECT_THAT(error_of([&] { load_state(path("step-0"), model, optimizer); }),
                AllOf(HasSubstr("expected the parameters of group 0 in groups of the same options"),
                      HasSubstr("make groups of the parameters that the state's have")));
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.125);
  });
}

TEST_F(ShardedStateTest, GivesGroupsTheirOptionsBackUnlessThatIsNotWanted) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    auto& options = static_cast<AdamWOptions&>(run.optimizer.param_groups()[0].options());
    options.lr(0.125).betas({0.8, 0.75}).weight_decay(1e-300);
    save_state(path("step-0"), run.model, run.optimizer);
    options.lr(1).betas({0.1, 0.2}).weight_decay(0);
    load_state(path("step-0"), run.model, run.optimizer, {.optimizer_options = false});
    EXPECT_EQ(options.lr(), 1);
    load_state(path("step-0"), run.model, run.optimizer);
    EXPECT_EQ(options.lr(), 0.125);
    EXPECT_EQ(options.betas(), std::make_tuple(0.8, 0.75));
    EXPECT_EQ(options.weight_decay(), 1e-300);
  });
}

TEST_F(ShardedStateTest, GivesTheRunItsSamplesScalerSpikesScheduleAndValuesBack) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 2, kAdamW);
    const AccumulatorOptions options{.loss_scaler = accumulate::LossScalerOptions(),
                                     .norm_spikes = accumulate::NormSpikeOptions()};
    Accumulator accumulator(run.model, options);
    accumulator.loss_scaler().update(true);
    accumulator.norm_spikes()->look(1.5);
    torch::optim::StepLR schedule(run.optimizer, 2, 0.5);
    for (int step = 0; step < 3; ++step) schedule.step();
    save_state(path("step-40"), run.model, run.optimizer,
               {.step = 40,
                .samples = 1 << 20,
                .accumulator = &accumulator,
                .scheduler = &schedule,
                .values = {{"epoch", "3"}, {"note", "tab\t\"quotes\" é"}}});

    Trained<Oddball> other(world, 3, kAdamW);
    Accumulator fresh(other.model, options);
    torch::optim::StepLR fresh_schedule(other.optimizer, 2, 0.5);
    RunState state{.accumulator = &fresh, .scheduler = &fresh_schedule};
    load_state(path("step-40"), other.model, other.optimizer, state);
    EXPECT_EQ(state.step, 40);
    EXPECT_EQ(state.samples, 1 << 20);
    EXPECT_EQ(state.values.at("note"), "tab\t\"quotes\" é");
    EXPECT_EQ(fresh.loss_scaler().scale(), 32768);
    EXPECT_EQ(fresh.loss_scaler().skipped_steps(), 1);
    const auto lr = [](const auto& of) { return of.param_groups()[0].options().get_lr(); };
    for (int step = 0; step < 3; ++step) {
      schedule.step();
      fresh_schedule.step();
      EXPECT_EQ(lr(run.optimizer), lr(other.optimizer));
    }
  });
}

TEST_F(ShardedStateTest, LetsGeneratorsOfRandomNumbersGoOn) {
  run_ranks(1, [&](comm::World& world) {
    Trained<Oddball> run(world, 0, kAdamW);
    torch::manual_seed(11);
    torch::randn({3});
    save_state(path("step-0"), run.model, run.optimizer);
    const torch::Tensor expected = torch::randn({100});
    torch::manual_seed(5);
    load_state(path("step-0"), run.model, run.optimizer, {.random = false});
    EXPECT_FALSE(torch::equal(torch::randn({100}), expected));
    load_state(path("step-0"), run.model, run.optimizer);
    EXPECT_TRUE(torch::equal(torch::randn({100}), expected));
  });
}

// ---- what a save refuses ----

TEST_F(ShardedStateTest, InTheMiddleOfAnAccumulationIsRefused) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 2, kAdamW);
    Accumulator accumulator(run.model, {.micro_steps = 2});
    const Samples samples = samples_of(0, 0);
    accumulator.backward(loss_of(run.model(samples.inputs), samples));
    EXPECT_THAT(zeropage::testing::error_of([&] {
                  save_state(path("step-0"), run.model, run.optimizer,
                             {.accumulator = &accumulator});
                }),
                HasSubstr("has gradients of 1 micro-batches"));
    accumulator.abandon();
  });
  EXPECT_FALSE(std::filesystem::exists(path("step-0")));
}

TEST_F(ShardedStateTest, OfRanksThatAreAtDifferentPlacesIsRefused) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    EXPECT_THAT(zeropage::testing::error_of([&] {
                  save_state(path("step-0"), run.model, run.optimizer, {.samples = world.rank()});
                }),
                HasSubstr("give the same RunState on all ranks"));
  });
}

TEST_F(ShardedStateTest, OfStepsThatAreOneLateIsRefused) {
  Options late;
  late.offload.optimizer = memory::Tier::kHost;
  late.offload.step = StepWhen::kOneStepLate;
  run_ranks(1, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW, late);
    EXPECT_THAT(
        zeropage::testing::error_of([&] { save_state(path("step-0"), run.model, run.optimizer); }),
        HasSubstr("kOneStepLate"));
  });
}

TEST_F(ShardedStateTest, AfterABackwardThatHasBegunTheStepIsRefused) {
  Options in_backward;
  in_backward.offload.optimizer = memory::Tier::kHost;
  in_backward.offload.step = StepWhen::kInBackward;
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 2, kAdamW, in_backward);
    run.train(1);
    const Samples samples = samples_of(0, 1);
    run.optimizer.zero_grad();
    loss_of(run.model(samples.inputs), samples).backward();
    EXPECT_THAT(
        zeropage::testing::error_of([&] { save_state(path("step-1"), run.model, run.optimizer); }),
        HasSubstr("save or load after step()"));
    run.optimizer.step();
    save_state(path("step-2"), run.model, run.optimizer);
  });
  EXPECT_FALSE(std::filesystem::exists(path("step-1")));
}

TEST_F(ShardedStateTest, OverSomethingElseIsRefusedOnAllRanksAndLeavesIt) {
  std::filesystem::create_directories(path("step-0"));
  std::ofstream(path("step-0/notes.txt")) << "mine";
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    EXPECT_THAT(
        zeropage::testing::error_of([&] { save_state(path("step-0"), run.model, run.optimizer); }),
        HasSubstr("is there and is no state"));
  });
  EXPECT_EQ(files_of(path("step-0")).at("notes.txt"), "mine");
}

TEST_F(ShardedStateTest, ByTorchSaveIsRefusedWithWhatToDo) {
  run_ranks(1, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    torch::optim::Optimizer& optimizer = run.optimizer;
    EXPECT_THAT(zeropage::testing::error_of([&] { torch::save(optimizer, path("o.pt")); }),
                HasSubstr("use zeropage::save_state("));
    torch::serialize::InputArchive archive;
    EXPECT_THAT(zeropage::testing::error_of([&] { optimizer.load(archive); }),
                HasSubstr("zeropage::load_state("));
  });
}

// ---- memory ----

TEST_F(ShardedStateTest, SavesAndLoadsWithinItsBuffers) {
  struct BigImpl : torch::nn::Module {
    BigImpl() {
      for (int i = 0; i < 8; ++i) {
        register_module(c10::str("layer", i), torch::nn::Linear(512, 512));
      }
    }
  };
  run_ranks(2, [&](comm::World& world) {
    Options options;
    options.stage = Stage::kParameters;
    options.page_bytes = 1 << 20;
    DistributedDataParallel<std::shared_ptr<BigImpl>> model(std::make_shared<BigImpl>(), world,
                                                            options);
    Optimizer<AdamW> optimizer(model, kAdamW);
    auto& ledger = *memory::Ledger::current();
    const auto peak_over = [&](const auto& action) {
      const int64_t before = ledger.now(torch::kCPU).total();
      ledger.reset_peak();
      action();
      return ledger.at_peak(torch::kCPU).total() - before;
    };
    constexpr int64_t kBuffers = 3 * ((4 << 20) + 4096) + 4096;
    EXPECT_LE(peak_over([&] { save_state(path("step-0"), model, optimizer); }),
              kBuffers + (64 << 10));
    EXPECT_LE(peak_over([&] { load_state(path("step-0"), model, optimizer); }), 64 << 10);
  });
}

// ---- beside training ----

class StateSaverTest : public ShardedStateTest {};

TEST_F(StateSaverTest, SavesWhatWasThereWhenItWasCalledThoughTrainingGoesOn) {
  for (const int stage : {0, 3}) {
    run_ranks(2, [&](comm::World& world) {
      Trained<Oddball> run(world, stage, kAdamW);
      StateSaver saver(path("run"), world);
      run.train(2);
      save_state(path("now/step-2"), run.model, run.optimizer);
      saver.save(run.model, run.optimizer);
      run.train(5);
      saver.wait();
      ASSERT_TRUE(saver.last());
      EXPECT_EQ(saver.last()->step, 2);
    });
    EXPECT_TRUE(files_of(path("run/step-2")) == files_of(path("now/step-2"))) << stage;
  }
}

TEST_F(StateSaverTest, KeepsTheNewestAndEveryNth) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 2, kAdamW);
    StateSaver saver(path("run"), world, {.keep_last = 2, .keep_every = 30});
    for (int64_t step = 10; step <= 80; step += 10) {
      saver.save(run.model, run.optimizer, {.step = step});
    }
    saver.wait();
  });
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path("run"))) {
    names.insert(entry.path().filename());
  }
  EXPECT_THAT(names,
              ElementsAre(".run-token", "latest", "step-30", "step-60", "step-70", "step-80"));
}

TEST_F(StateSaverTest, TellsAnErrorAtTheNextCallOnAllRanksAndTrainingGoesOn) {
  std::filesystem::create_directories(path("run/step-7"));
  std::ofstream(path("run/step-7/notes.txt")) << "mine";
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 3, kAdamW);
    StateSaver saver(path("run"), world);
    saver.save(run.model, run.optimizer, {.step = 7});
    run.train(1);
    EXPECT_THAT(
        zeropage::testing::error_of([&] { saver.save(run.model, run.optimizer, {.step = 8}); }),
        HasSubstr("is there and is no state"));
    run.train(1);
    saver.save(run.model, run.optimizer, {.step = 9});
    saver.wait();
    EXPECT_EQ(load_state(path("run"), run.model, run.optimizer).step, 9);
  });
}

TEST_F(StateSaverTest, AsksForTheEndOnAllRanksWhenASignalCameToOne) {
  run_ranks(2, [&](comm::World& world) {
    StateSaver saver(path("run"), world, {.on_signal = world.rank() == 0});
    if (world.rank() == 1) {
      EXPECT_THAT(zeropage::testing::error_of([&] { (void)saver.stop_requested(); }),
                  HasSubstr("on_signal"));
    }
  });
  run_ranks(1, [&](comm::World& world) {
    const auto is_handled = [](int signal) {
      struct sigaction now {};
      ::sigaction(signal, nullptr, &now);
      return now.sa_handler != SIG_DFL;
    };
    auto first =
        std::make_unique<StateSaver>(path("run"), world, StateSaverOptions{.on_signal = true});
    StateSaver saver(path("other"), world, {.on_signal = true});
    EXPECT_EQ(saver.stop_signal(), 0);
    EXPECT_FALSE(saver.stop_requested());
    ::raise(SIGINT);
    EXPECT_EQ(saver.stop_signal(), SIGINT);
    EXPECT_FALSE(is_handled(SIGINT)) << "a second one ends the process";
    ::raise(SIGTERM);
    EXPECT_EQ(saver.stop_signal(), SIGTERM);
    EXPECT_TRUE(saver.stop_requested());
    first.reset();
    EXPECT_TRUE(is_handled(SIGTERM)) << "there is another saver";
  });
}

// Ranks that live on where a job was started again.
TEST_F(StateSaverTest, TheOlderOfTwoRunsInAFolderThrowsAndRemovesNothing) {
  for (const bool asynchronous : {true, false}) {
    const std::string folder = path(asynchronous ? "beside" : "at once");
    run_ranks(2, [&](comm::World& world) {
      Trained<Oddball> old_run(world, 2, kAdamW), new_run(world, 2, kAdamW);
      const StateSaverOptions options{.keep_last = 1, .asynchronous = asynchronous};
      StateSaver older(folder, world, options);
      older.save(old_run.model, old_run.optimizer, {.step = 1});
      older.wait();
      StateSaver newer(folder, world, options);
      load_state(folder, new_run.model, new_run.optimizer);
      newer.save(new_run.model, new_run.optimizer, {.step = 2});
      newer.wait();
      const auto save_again = [&] {
        older.save(old_run.model, old_run.optimizer, {.step = 3});
        older.wait();
      };
      EXPECT_THAT(zeropage::testing::error_of(save_again),
                  AllOf(HasSubstr(folder + ": run 1 (host "),
                        HasSubstr("has lost this folder to run 2 (host ")));
      EXPECT_EQ(load_state(folder, new_run.model, new_run.optimizer).step, 2);
      newer.save(new_run.model, new_run.optimizer, {.step = 3});
      newer.wait();
      EXPECT_EQ(load_state(folder, new_run.model, new_run.optimizer).step, 3);
    });
  }
}

// The newer run starts, and saves under the same name, while the older one writes. Its ranks may then find their files
// gone; what they print is the cause.
TEST_F(StateSaverTest, TheOlderRunIsToldAlsoWhereItWasSavingWhenTheNewerOneStarted) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    const comm::World texts = world.beside("state", std::chrono::minutes(1));
    std::unique_ptr<state::RunToken> token;
    if (world.rank() == 0) token = std::make_unique<state::RunToken>(path("run"));
    saving::SharedSave older(texts, path("run/step-9"), token.get());
    const auto plan = saving::plan_state(texts, run.model, &run.optimizer, {.step = 9}, {});
    older.create(plan);
    StateSaver newer(path("run"), world, {.asynchronous = false});
    newer.save(run.model, run.optimizer, {.step = 9});
    const auto gone = std::make_exception_ptr(std::runtime_error("No such file"));
    EXPECT_THAT(zeropage::testing::error_of([&] {
                  older.commit(plan, {}, gone, /*update_latest=*/true, /*keep=*/{.last = 1});
                }),
                HasSubstr("has lost this folder to run 2"));
    EXPECT_EQ(newer.last()->notes.empty(), world.rank() != 0) << "it removed the older's files";
    EXPECT_EQ(load_state(path("run"), run.model, run.optimizer).step, 9);
  });
}

TEST_F(StateSaverTest, TakesAFolderThatHasStatesAndNoToken) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 3, kAdamW);
    save_state(path("run/step-1"), run.model, run.optimizer, {.step = 1});
    EXPECT_FALSE(std::filesystem::exists(path("run/.run-token")));
    EXPECT_EQ(load_state(path("run"), run.model, run.optimizer).step, 1);
    StateSaver saver(path("run"), world);
    EXPECT_EQ(load_state(path("run"), run.model, run.optimizer).step, 1);
    saver.save(run.model, run.optimizer, {.step = 2});
    saver.wait();
    EXPECT_EQ(load_state(path("run"), run.model, run.optimizer).step, 2);
  });
}

TEST_F(StateSaverTest, RefusesAStepThatIsOlderThanAWholeStateFromBefore) {
  run_ranks(2, [&](comm::World& world) {
    Trained<Oddball> run(world, 1, kAdamW);
    save_state(path("run/step-5"), run.model, run.optimizer, {.step = 5});
    StateSaver saver(path("run"), world, {.keep_last = 1, .asynchronous = false});
    const auto save = [&] { saver.save(run.model, run.optimizer, {.step = 3}); };
    EXPECT_THAT(zeropage::testing::error_of(save),
                AllOf(HasSubstr("got step-5 of an earlier run"), HasSubstr("a folder of its own")));
    EXPECT_EQ(load_state(path("run"), run.model, run.optimizer).step, 5);
    world.communicator().barrier("it was loaded").wait();
    if (world.rank() == 0) flip_a_bit(path("run/step-5/weights.safetensors"), 5000);
    world.communicator().barrier("it is broken").wait();
    save();
    EXPECT_TRUE(std::filesystem::exists(path("run/step-3/manifest.json")));
  });
}

// ---- before training ----

TEST_F(ShardedStateTest, AFolderThatTakesNoStateIsRefusedOnAllRanksBeforeTheFirstStep) {
  std::ofstream(path("file")) << "not a folder";
  for (const int stage : {0, 3}) {
    run_ranks(2, [&](comm::World& world) {
      Trained<Oddball> run(world, stage, kAdamW);
      EXPECT_THAT(
          error_of([&] { check_can_save(path("file") + "/run", run.model, run.optimizer); }),
          HasSubstr(path("file") + ": expected a folder, got something else"));
      check_can_save(path("run"), run.model, run.optimizer);
      world.communicator().barrier("the check").wait();
      EXPECT_TRUE(std::filesystem::is_empty(path("run")));
      // It changes nothing, and a state that is there is no obstacle.
      run.train(1);
      save_state(path("run") + "/step-1", run.model, run.optimizer);
      check_can_save(path("run"), run.model, run.optimizer);
      run.train(1);
      world.communicator().barrier("both stages").wait();
      if (world.rank() == 0) std::filesystem::remove_all(path("run"));
    });
  }
}

}  // namespace
}  // namespace zeropage::sharded_state_test
