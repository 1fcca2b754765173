// A model that is parked has nothing on its device, and goes on with the bits of one that never was.
#include <cerrno>
#include <functional>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/faulty_device.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/zeropage.h"

namespace zeropage::parking_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::Tier;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using memory::operator""_KiB;

constexpr int kSteps = 4;

// Weights of two pages whose states may be 8 bits; biases that keep fp32; a buffer that training writes.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    first = register_module("first", torch::nn::Linear(7, 701));
    norm = register_module("norm", torch::nn::BatchNorm1d(701));
    last = register_module("last", torch::nn::Linear(701, 7));
    table = register_buffer("table", torch::arange(7 * 4, torch::kFloat).view({4, 7}) / 100);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(norm(first(x + table[1])))).to(torch::kFloat);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor table;
};
TORCH_MODULE(Wide);

template <typename Model>
void train_one(Model& model, torch::optim::Optimizer& optimizer, int step) {
  const Samples samples = samples_of(model.world().rank(), step);
  loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
  optimizer.step();
  optimizer.zero_grad();
}

// What training holds on the host from step to step, by the rank's ledger. What a world's segments hold is staging.
int64_t held_here() {
  const memory::Breakdown now = memory::Ledger::current()->now();
  return now.persistent() + now[Kind::kBucket];
}
// The same with all else but data and outputs.
int64_t staging_here() {
  return memory::Ledger::current()->now()[Kind::kStaging];
}

struct Setting {
  int stage = 1;
  int ranks = 2;
  std::function<void(Options&)> change = [](Options&) {};

  Options all() const {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    change(options);
    return options;
  }
};

template <typename Module, typename A>
std::vector<torch::Tensor> trained(const Setting& setting,
                                   const typename OptimizerTraits<A>::Options& algorithm,
                                   const std::string& park_in) {
  std::vector<torch::Tensor> result;
  run_ranks(setting.ranks, [&](comm::World& world) {
    DistributedDataParallel<Module> model(make<Module>(), world, setting.all());
    Optimizer<A> optimizer(model, algorithm);
    for (int step = 0; step < kSteps; ++step) {
      train_one(model, optimizer, step);
      if (park_in.empty() || step == 0) continue;
      const int64_t before = held_here();
      const int64_t staging = staging_here();
      const auto ledger = memory::Ledger::current();
      const int64_t away = ledger->offloaded(Tier::kNvme).total();
      model.park(Tier::kNvme, park_in);
      EXPECT_TRUE(model.is_parked());
      EXPECT_EQ(held_here(), 0) << memory::memory_table(
          std::vector<memory::MemoryColumn>{{"parked", ledger->now(), 0}});
      EXPECT_LE(staging_here(), staging);
      const int64_t parked = ledger->offloaded(Tier::kNvme).total() - away;
      model.resume();
      EXPECT_FALSE(model.is_parked());
      // A page that was gathered ahead is not there again.
      EXPECT_LE(held_here(), before);
      EXPECT_GE(parked, held_here());
      EXPECT_EQ(ledger->offloaded(Tier::kNvme).total(), away);
    }
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

template <typename Module, typename A = AdamW>
void expect_parking_changes_no_bit(const Setting& setting,
                                   const typename OptimizerTraits<A>::Options& algorithm) {
  const DiskFolder disk;
  const auto expected = trained<Module, A>(setting, algorithm, "");
  EXPECT_TRUE(same_bits(expected, (trained<Module, A>(setting, algorithm, disk.path()))));
  EXPECT_TRUE(disk.empty());
}

const AdamWOptions kAdamW = AdamWOptions(0.01);

class ParkingTest : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(ParkingTest, GoesOnWithTheSameBits) {
  const auto [stage, ranks] = GetParam();
  expect_parking_changes_no_bit<Oddball>({stage, ranks}, kAdamW);
  expect_parking_changes_no_bit<Wide>({stage, ranks}, kAdamW);
}

INSTANTIATE_TEST_SUITE_P(Stages, ParkingTest,
                         ::testing::Values(std::pair(0, 1), std::pair(3, 1), std::pair(0, 2),
                                           std::pair(1, 2), std::pair(2, 2), std::pair(3, 2),
                                           std::pair(1, 3), std::pair(3, 4)),
                         [](const auto& info) {
                           return c10::str("Stage", info.param.first, "On", info.param.second);
                         });

TEST(ParkedFormatsTest, LowPrecisionGoesOnWithTheSameBits) {
  for (const auto update :
       {LowPrecisionUpdate::kMasterWeights, LowPrecisionUpdate::kSplitMasterWeights,
        LowPrecisionUpdate::kStochasticRounding, LowPrecisionUpdate::kNearest}) {
    for (const int stage : {1, 3}) {
      SCOPED_TRACE(c10::str(static_cast<int>(update), " at stage ", stage));
      expect_parking_changes_no_bit<Oddball>({stage, 2,
                                              [&](Options& options) {
                                                options.compute_dtype = torch::kBFloat16;
                                                options.low_precision_update = update;
                                              }},
                                             kAdamW);
    }
  }
}

TEST(ParkedFormatsTest, SmallStatesGoOnWithTheSameBits) {
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
    for (const int stage : {0, 3}) {
      SCOPED_TRACE(c10::str(static_cast<int>(format), " at stage ", stage));
      expect_parking_changes_no_bit<Wide>(
          {stage, 2, [&](Options& options) { options.optimizer_state = format; }}, kAdamW);
    }
  }
}

TEST(ParkedFormatsTest, OtherOptimizersGoOnWithTheSameBits) {
  using namespace torch::optim;
  const Setting setting{2, 2};
  expect_parking_changes_no_bit<Oddball, SGD>(setting, SGDOptions(0.1).momentum(0.9));
  expect_parking_changes_no_bit<Oddball, SGD>(setting, SGDOptions(0.1));
  expect_parking_changes_no_bit<Oddball, Adagrad>(setting, AdagradOptions(0.1));
  // By the class itself.
  expect_parking_changes_no_bit<Oddball, RMSprop>(setting, RMSpropOptions(0.01).momentum(0.9));
  expect_parking_changes_no_bit<Oddball>(
      {3, 2, [](Options& options) { options.update_by = UpdateBy::kClass; }}, kAdamW);
  expect_parking_changes_no_bit<Oddball, Lamb>(setting, LambOptions(0.01));
  expect_parking_changes_no_bit<Wide, Adafactor>(setting, AdafactorOptions(0.01));
}

TEST(ParkedFormatsTest, GroupsOfRanksAndSecondaryShardsGoOnWithTheSameBits) {
  for (const int stage : {1, 3}) {
    expect_parking_changes_no_bit<Oddball>(
        {stage, 4, [](Options& options) { options.shard_within = 2; }}, kAdamW);
  }
  expect_parking_changes_no_bit<Oddball>(
      {3, 4, [](Options& options) { options.secondary_shard_within = 2; }}, kAdamW);
  expect_parking_changes_no_bit<Oddball>({3, 2,
                                          [](Options& options) {
                                            options.reshard = Reshard::kAfterStep;
                                            options.minimum_sharded_bytes = 600;
                                          }},
                                         kAdamW);
}

TEST(ParkedFormatsTest, WhatIsOffloadedStaysThereAndGoesOnWithTheSameBits) {
  const DiskFolder tier;
  for (const Tier optimizer : {Tier::kHost, Tier::kNvme}) {
    for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward, StepWhen::kOneStepLate}) {
      if (when == StepWhen::kOneStepLate && optimizer != Tier::kHost) continue;
      for (const int stage : {1, 3}) {
        if (when == StepWhen::kOneStepLate && stage == 3) continue;
        SCOPED_TRACE(c10::str(static_cast<int>(optimizer), ", ", static_cast<int>(when),
                              " at stage ", stage));
        expect_parking_changes_no_bit<Oddball>({stage, 2,
                                                [&](Options& options) {
                                                  options.compute_dtype = torch::kBFloat16;
                                                  options.offload.optimizer = optimizer;
                                                  options.offload.step = when;
                                                  if (optimizer == Tier::kNvme) {
                                                    options.offload.nvme_directory = tier.path();
                                                  }
                                                }},
                                               kAdamW);
      }
    }
    expect_parking_changes_no_bit<Oddball>({3, 2,
                                            [&](Options& options) {
                                              options.offload.optimizer = optimizer;
                                              options.offload.parameters = optimizer;
                                              if (optimizer == Tier::kNvme) {
                                                options.offload.nvme_directory = tier.path();
                                              }
                                            }},
                                           kAdamW);
  }
}

// ---- several things of one model ----

std::vector<torch::Tensor> trained_by_two(int stage, const std::string& park_in) {
  std::vector<torch::Tensor> result;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Wide> model(make<Wide>(), world, Setting{stage}.all());
    Optimizer<AdamW> first(model, {{{model->first->weight, model->first->bias}}}, kAdamW);
    auto last = std::make_unique<Optimizer<torch::optim::SGD>>(
        model, Optimizer<torch::optim::SGD>::Groups{{model->last->parameters()}},
        torch::optim::SGDOptions(0.1).momentum(0.9));
    WeightAverage average(model, {.decay = 0.5});
    // What the script keeps of a parameter sees it again.
    const torch::Tensor view =
        stage < 3 ? model->last->weight.detach().view({-1}) : torch::Tensor();
    for (int step = 0; step < kSteps; ++step) {
      const Samples samples = samples_of(world.rank(), step);
      loss_of(model(samples.inputs), samples).backward();
      first.step();
      last->step();
      model.zero_grad();
      average.update();
      if (park_in.empty()) continue;
      model.park(Tier::kNvme, park_in);
      EXPECT_EQ(held_here(), 0);
      model.resume();
    }
    if (view.defined()) {
      EXPECT_TRUE(torch::equal(view, model->last->weight.view({-1})));
    }
    average.swap_in();
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

TEST(ParkedModelTest, HasItsOptimizersAndItsWeightAverage) {
  const DiskFolder disk;
  for (const int stage : {0, 1, 3}) {
    SCOPED_TRACE(stage);
    EXPECT_TRUE(same_bits(trained_by_two(stage, ""), trained_by_two(stage, disk.path())));
  }
}

TEST(ParkedModelTest, MayLoseAnOptimizerMeanwhile) {
  const DiskFolder disk;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Wide> model(make<Wide>(), world, Setting{3}.all());
    auto optimizer = std::make_unique<Optimizer<AdamW>>(model, kAdamW);
    train_one(model, *optimizer, 0);
    model.park(Tier::kNvme, disk.path());
    optimizer.reset();
    model.resume();
    EXPECT_EQ(memory::Ledger::current()->now()[Kind::kOptimizerState], 0);
    Optimizer<AdamW> other(model, kAdamW);
    train_one(model, other, 1);
  });
}

// A table that lies elsewhere afterwards has been written by nobody. One that the user wrote before has.
TEST(ParkedModelTest, SendsOnlyBuffersThatWereWritten) {
  const DiskFolder disk;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Wide> model(make<Wide>(), world, Setting{1}.all());
    Optimizer<AdamW> optimizer(model, kAdamW);
    const auto sent_in_step = [&](int step) {
      const int64_t before = world.communicator().wire_traffic().broadcast.bytes;
      train_one(model, optimizer, step);
      const auto bytes =
          torch::tensor({world.communicator().wire_traffic().broadcast.bytes - before});
      world.communicator().all_reduce(bytes, comm::ReduceOp::kMax, "bytes").wait();
      return bytes.item<int64_t>();
    };
    const auto table_bytes = static_cast<int64_t>(model.module()->table.nbytes());
    sent_in_step(0);
    const int64_t of_statistics = sent_in_step(1);
    // Memory that would else be given out again, at the address where the table was.
    std::vector<torch::Tensor> taken;
    model.park(Tier::kNvme, disk.path());
    for (int i = 0; i < 64; ++i) taken.push_back(torch::empty({7 * 4}));
    model.resume();
    EXPECT_EQ(sent_in_step(2), of_statistics);
    {
      const torch::NoGradGuard no_grad;
      if (world.rank() == 1) model.module()->table.mul_(2);
    }
    model.park(Tier::kNvme, disk.path());
    model.resume();
    EXPECT_EQ(sent_in_step(3), of_statistics + table_bytes);
    EXPECT_EQ(model.module()->table[0][1].item<float>(), 0.01F) << "rank 0's";
  });
}

// Its memory stays until somebody looks whether it was zeroed.
TEST(ParkedModelTest, HasNoGradientThatWasReadBehindTheStep) {
  const DiskFolder disk;
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    run_ranks(2, [&](comm::World& world) {
      DistributedDataParallel<Wide> model(make<Wide>(), world, Setting{stage}.all());
      Optimizer<AdamW> optimizer(model, kAdamW);
      const Samples samples = samples_of(world.rank(), 0);
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
      for (const torch::Tensor& parameter : model.module()->parameters()) {
        EXPECT_GE(parameter.grad().abs().sum().item<float>(), 0);
      }
      model.module()->zero_grad();
      model.park(Tier::kNvme, disk.path());
      EXPECT_EQ(held_here(), 0);
      model.resume();
      train_one(model, optimizer, 1);
    });
  }
}

// Two models, as a policy and its reference, in one folder; one of them is used while the other is parked.
TEST(ParkedModelTest, LeavesOtherModelsAlone) {
  const DiskFolder disk;
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Wide> policy(make<Wide>(), world, Setting{2}.all());
    DistributedDataParallel<Wide> reference(make<Wide>(), world, Setting{3}.all());
    reference.eval();
    const torch::NoGradGuard no_grad;
    const torch::Tensor inputs = samples_of(world.rank(), 0).inputs;
    const torch::Tensor expected = reference(inputs);
    policy.park(Tier::kNvme, disk.path());
    EXPECT_TRUE(torch::equal(expected, reference(inputs)));
    reference.park(Tier::kNvme, disk.path());
    EXPECT_EQ(held_here(), 0);
    policy.resume();
    reference.resume();
    EXPECT_TRUE(torch::equal(expected, reference(inputs)));
  });
  EXPECT_TRUE(disk.empty());
}

TEST(ParkedModelTest, TakesItsFileAlongWhereItGoes) {
  const DiskFolder disk;
  run_ranks(2, [&](comm::World& world) {
    const Wide module = make<Wide>();
    std::unique_ptr<Optimizer<AdamW>> optimizer;
    {
      DistributedDataParallel<Wide> model(module, world, Setting{1}.all());
      optimizer = std::make_unique<Optimizer<AdamW>>(model, kAdamW);
      model.park(Tier::kNvme, disk.path());
      EXPECT_FALSE(disk.empty());
    }
    EXPECT_THAT(error_of([&] { optimizer->step(); }),
                HasSubstr("the model was destroyed while it was parked, and its values are gone"));
    EXPECT_THAT(error_of([&] { module->last->weight.sum(); }),
                HasSubstr("was destroyed while it was parked"));
  });
  EXPECT_TRUE(disk.empty());
}

// ---- what a script does with it meanwhile ----

class MeanwhileTest : public ::testing::TestWithParam<int> {
 protected:
  using Model = DistributedDataParallel<Wide>;
  using Use = std::function<void(Model&, Optimizer<AdamW>&)>;

  // The uses are refused on all ranks while the model is parked, and training has the bits of before then.
  void expect_refused(const std::vector<Use>& uses, const std::string& words) {
    const DiskFolder disk;
    std::vector<torch::Tensor> expected, actual;
    for (auto* const into : {&expected, &actual}) {
      run_ranks(2, [&](comm::World& world) {
        Model model(make<Wide>(), world, Setting{GetParam()}.all());
        Optimizer<AdamW> optimizer(model, kAdamW);
        train_one(model, optimizer, 0);
        if (into == &actual) {
          model.park(Tier::kNvme, disk.path());
          for (size_t index = 0; index < uses.size(); ++index) {
            EXPECT_THAT(error_of([&] { uses[index](model, optimizer); }),
                        AllOf(HasSubstr(words), HasSubstr("parked"), HasSubstr("resume()")))
                << "use " << index;
          }
          model.zero_grad();
          optimizer.zero_grad();
          EXPECT_EQ(model->last->weight.numel(), 7 * 701);
          EXPECT_EQ(model->last->weight.t().size(0), 701);
          model.resume();
        }
        train_one(model, optimizer, 1);
        const auto state = full_state(model);
        if (world.rank() != 0) return;
        for (const auto& item : state) into->push_back(item.value());
      });
    }
    EXPECT_TRUE(same_bits(expected, actual));
  }
};

TEST_P(MeanwhileTest, ForwardIsRefused) {
  expect_refused({[](Model& model, auto&) { model(samples_of(0, 0).inputs); },
                  [](Model& model, auto&) {
                    const torch::NoGradGuard no_grad;
                    model(samples_of(0, 0).inputs);
                  }},
                 "forward()");
}

TEST_P(MeanwhileTest, BackwardOverAnEarlierGraphIsRefused) {
  const DiskFolder disk;
  run_ranks(2, [&](comm::World& world) {
    Model model(make<Wide>(), world, Setting{GetParam()}.all());
    Optimizer<AdamW> optimizer(model, kAdamW);
    const torch::Tensor loss = loss_of(model(samples_of(0, 0).inputs), samples_of(0, 0));
    model.park(Tier::kNvme, disk.path());
    EXPECT_THAT(error_of([&] { loss.backward({}, /*retain_graph=*/true); }), HasSubstr("parked"));
    model.resume();
    loss.backward();
    optimizer.step();
  });
}

TEST_P(MeanwhileTest, WhatReadsOrWritesIsRefused) {
  expect_refused({[](Model& model, auto&) { model->forward(samples_of(0, 0).inputs); },
                  [](auto&, auto& optimizer) { optimizer.step(); },
                  [](Model& model, auto&) { zeropage::clip_grad_norm_(model, 1.0); },
                  [](Model& model, auto&) { model->last->weight.sum(); },
                  [](Model& model, auto&) { model->last->weight.detach().view({-1}).sum(); },
                  [](Model& model, auto&) {
                    const torch::NoGradGuard no_grad;
                    model->last->weight.zero_();
                  },
                  [](Model& model, auto&) { model->table.sum(); },
                  [](Model& model, auto&) { model->norm->running_mean.zero_(); },
                  [](Model& model, auto&) { model->table.data_ptr(); },
                  [](Model& model, auto&) { model.module()->to(torch::kDouble); },
                  [](Model& model, auto&) { GatheredParameters guard(model); },
                  [](Model& model, auto&) { full_state(model); },
                  [](Model& model, auto&) { WeightAverage average(model); },
                  [](Model& model, auto&) { Optimizer<AdamW> other(model, kAdamW); },
                  [](Model& model, auto&) { visit_owned_shards(model, [](const auto&) {}); }},
                 "");
}

TEST_P(MeanwhileTest, SavingAndLoadingAreRefused) {
  const DiskFolder folder;
  const std::string saved = folder.path() + "/before";
  run_ranks(2, [&](comm::World& world) {
    Model model(make<Wide>(), world, Setting{GetParam()}.all());
    Optimizer<AdamW> optimizer(model, kAdamW);
    save_state(saved, model, optimizer);
  });
  expect_refused(
      {[&](Model& model, auto& optimizer) { save_state(folder.path() + "/now", model, optimizer); },
       [&](Model& model, auto&) { save_weights(folder.path() + "/weights", model); },
       [&](Model& model, auto& optimizer) { load_state(saved, model, optimizer); }},
      "");
}

// A save that goes on beside training has its own copy.
TEST_P(MeanwhileTest, ASaveThatHasBegunGoesOn) {
  const DiskFolder folder;
  run_ranks(2, [&](comm::World& world) {
    Model model(make<Wide>(), world, Setting{GetParam()}.all());
    Optimizer<AdamW> optimizer(model, kAdamW);
    train_one(model, optimizer, 0);
    const auto before = full_state(model);
    StateSaver saver(folder.path(), world);
    saver.save(model, optimizer, {.step = 1});
    model.park(Tier::kNvme, folder.path());
    saver.wait();
    model.resume();
    train_one(model, optimizer, 1);
    load_state(folder.path() + "/step-1", model, optimizer);
    const auto after = full_state(model);
    // They are rank 0's.
    for (const auto& item : before) {
      EXPECT_TRUE(torch::equal(item.value(), after[item.key()]));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, MeanwhileTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return c10::str("Stage", info.param); });

// ---- what park() refuses ----

class ParkIsRefusedTest : public ::testing::TestWithParam<int> {
 protected:
  using Model = DistributedDataParallel<Wide>;

  void on_ranks(const std::function<void(Model&, Optimizer<AdamW>&, int rank)>& script) {
    run_ranks(2, [&](comm::World& world) {
      Model model(make<Wide>(), world, Setting{GetParam()}.all());
      Optimizer<AdamW> optimizer(model, kAdamW);
      train_one(model, optimizer, 0);
      script(model, optimizer, world.rank());
      EXPECT_FALSE(model.is_parked());
      model.zero_grad();
      train_one(model, optimizer, 1);
    });
  }
  std::string error_of_park(Model& model) {
    return error_of([&] { model.park(Tier::kNvme, disk_.path()); });
  }
  static torch::Tensor loss(Model& model) {
    return loss_of(model(samples_of(0, 0).inputs), samples_of(0, 0));
  }

  const DiskFolder disk_;
};

TEST_P(ParkIsRefusedTest, BetweenBackwardAndStep) {
  on_ranks([&](Model& model, auto& optimizer, int) {
    loss(model).backward();
    EXPECT_THAT(error_of_park(model),
                AllOf(HasSubstr("has a gradient"), HasSubstr("step() and zero_grad()")));
    optimizer.step();
    EXPECT_THAT(error_of_park(model), HasSubstr("has a gradient"));
  });
}

TEST_P(ParkIsRefusedTest, UnderNoSyncAndWithinAnAccumulation) {
  on_ranks([&](Model& model, auto&, int) {
    const NoSync guard = model.no_sync();
    EXPECT_THAT(error_of_park(model), HasSubstr("no_sync()"));
  });
  on_ranks([&](Model& model, auto& optimizer, int) {
    Accumulator accumulator(model, {.micro_steps = 2});
    accumulator.backward(loss(model));
    EXPECT_THAT(error_of_park(model), HasSubstr("park(): "));
    accumulator.backward(loss(model));
    accumulator.step(optimizer);
    EXPECT_EQ(error_of_park(model), "");
    model.resume();
    accumulator.backward(loss(model));
    accumulator.backward(loss(model));
    accumulator.step(optimizer);
  });
}

TEST_P(ParkIsRefusedTest, WhereAGradientIsOnOneRankAlone) {
  on_ranks([&](Model& model, auto&, int rank) {
    if (rank == 1) model->last->bias.mutable_grad() = torch::ones({7});
    EXPECT_THAT(error_of_park(model), HasSubstr("parameter \"last.bias\" has a gradient"));
  });
}

TEST_P(ParkIsRefusedTest, WithoutAPlaceForIt) {
  on_ranks([&](Model& model, auto&, int rank) {
    EXPECT_THAT(error_of([&] { model.park(Tier::kHost); }),
                HasSubstr("the model's device is the host"));
    EXPECT_THAT(error_of([&] { model.park(Tier::kDevice); }), HasSubstr("park(Tier::kDevice)"));
    EXPECT_THAT(error_of([&] { model.park(Tier::kNvme); }), HasSubstr("a directory"));
    // On one rank alone.
    const std::string there = rank == 0 ? disk_.path() : disk_.path() + "/nowhere";
    EXPECT_THAT(error_of([&] { model.park(Tier::kNvme, there); }), HasSubstr("nowhere"));
    EXPECT_THAT(error_of([&] { model.resume(); }), HasSubstr("not parked"));
    EXPECT_EQ(error_of_park(model), "");
    EXPECT_THAT(error_of_park(model), HasSubstr("parked already"));
    model.resume();
  });
}

// Also where one rank has written all of its own.
TEST_P(ParkIsRefusedTest, OnADiskThatIsFull) {
  const DiskFolder full;
  const auto script = std::make_shared<DeviceScript>();
  script->faults = {{.direction = Direction::kWrite, .first = 0, .count = 1000, .error = ENOSPC}};
  const offload::detail::WrappedDisk disk(full.path(), faulty(script));
  on_ranks([&](Model& model, auto&, int rank) {
    const auto before = model->table.clone();
    EXPECT_THAT(error_of([&] { model.park(Tier::kNvme, rank == 1 ? full.path() : disk_.path()); }),
                HasSubstr("rank-1.parked"));
    EXPECT_TRUE(torch::equal(before, model->table));
    EXPECT_EQ(memory::Ledger::current()->offloaded(Tier::kNvme).total(), 0);
  });
  EXPECT_TRUE(full.empty());
  EXPECT_TRUE(disk_.empty());
}

// What a disk does not give back stays there, and so does all else.
TEST_P(ParkIsRefusedTest, ButNotLostWhereItCannotBeRead) {
  const DiskFolder broken;
  const auto script = std::make_shared<DeviceScript>();
  script->faults = {{.direction = Direction::kRead, .first = 0, .count = 8, .error = EIO}};
  const offload::detail::WrappedDisk disk(broken.path(), faulty(script));
  on_ranks([&](Model& model, auto&, int rank) {
    const auto before = model->table.clone();
    model.park(Tier::kNvme, rank == 1 ? broken.path() : disk_.path());
    int tries = 0;
    for (; model.is_parked() && tries < 20; ++tries) {
      const std::string error = error_of([&] { model.resume(); });
      EXPECT_EQ(model.is_parked(), !error.empty());
      if (!model.is_parked()) break;
      EXPECT_THAT(error_of([&] { model->table.sum(); }), HasSubstr("parked"));
    }
    EXPECT_GT(tries, 0);
    EXPECT_TRUE(torch::equal(before, model->table));
  });
}

TEST_P(ParkIsRefusedTest, OnOneRankAlone) {
  const auto errors = try_ranks(2, [&](comm::World& world) {
    Model model(make<Wide>(), world, Setting{GetParam()}.all());
    Optimizer<AdamW> optimizer(model, kAdamW);
    train_one(model, optimizer, 0);
    if (world.rank() == 0) model.park(Tier::kNvme, disk_.path());
    train_one(model, optimizer, 1);
  });
  EXPECT_THAT(message_of(errors[0]) + message_of(errors[1]), HasSubstr("park()"));
  EXPECT_TRUE(disk_.empty());
}

INSTANTIATE_TEST_SUITE_P(Stages, ParkIsRefusedTest, ::testing::Values(0, 3),
                         [](const auto& info) { return c10::str("Stage", info.param); });

}  // namespace
}  // namespace zeropage::parking_test
