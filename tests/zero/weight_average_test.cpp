#include "zeropage/weight_average.h"

#include <functional>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"
#include "zeropage/zeropage.h"

namespace zeropage::weight_average_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr double kDecay = 0.75;

// Weights by name, each as its elements lie in memory.
using ByName = std::map<std::string, torch::Tensor>;

torch::Tensor in_memory_order(const torch::Tensor& dense) {
  return dense.detach().as_strided({dense.numel()}, {1}).clone();
}

struct Trained {
  Trained(World& world, const Options& options)
      : model(make<Oddball>(), world, options), optimizer(model, AdamWOptions(0.01)) {}

  static Options options(int stage, torch::ScalarType dtype) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4096;
    options.update_by = UpdateBy::kClass;
    if (dtype != torch::kFloat) options.compute_dtype = dtype;
    return options;
  }

  // rank: whose samples.
  void step(int step, int rank = 0) {
    const Samples samples = samples_in(rank, step, model->first->weight.scalar_type());
    optimizer.zero_grad();
    loss_of(model(samples.inputs), samples).backward();
    optimizer.step();
  }
  void train(WeightAverage& average, int first, int end) {
    for (int at = first; at < end; ++at) {
      step(at);
      average.update();
    }
  }
  // An evaluation, which leaves its traces wherever it can.
  torch::Tensor evaluate() {
    const torch::NoGradGuard no_grad;
    model.eval();
    torch::Tensor outputs = model(samples_in(0, 77, model->first->weight.scalar_type()).inputs);
    model.train();
    return outputs;
  }

  DistributedDataParallel<Oddball> model;
  Optimizer<AdamW> optimizer;
};

// With all digits, of what this rank owns.
ByName exact_shards(const Trained& run) {
  ByName exact;
  visit_owned_shards(run.model,
                     [&](const OwnedShard& shard) { exact[shard.name] = shard.exact.clone(); });
  return exact;
}

void expect_same_shards(const ByName& expected, const ByName& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [name, values] : expected) {
    EXPECT_TRUE(torch::equal(values, actual.at(name))) << name;
  }
}

// This rank's parts of whole weights are what the model has.
void expect_owned(const ByName& whole, const Trained& run, const char* when) {
  size_t count = 0;
  visit_owned_shards(run.model, [&](const OwnedShard& shard) {
    const torch::Tensor expected =
        whole.at(shard.name).slice(0, shard.range.begin, shard.range.end);
    EXPECT_TRUE(torch::equal(shard.exact.to(torch::kFloat), expected)) << shard.name << " " << when;
    ++count;
  });
  EXPECT_EQ(count, whole.size());
}

struct ByHand {
  ByName average;
  ByName weights;
};

// N copies in plain LibTorch, and the average of their fp32 weights.
ByHand by_hand(int ranks, int steps, torch::ScalarType dtype) {
  std::vector<std::string> names;
  const Oddball named = make<Oddball>();
  for (const auto& parameter : distinct_parameters(named)) {
    for (const auto& item : named->named_parameters()) {
      if (!item.value().is_same(parameter)) continue;
      names.push_back(item.key());
      break;
    }
  }
  ByHand result;
  const auto after_step = [&](int step, const std::vector<torch::Tensor>& masters,
                              const std::vector<torch::Tensor>& parameters) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < names.size(); ++i) {
      const bool trains = parameters[i].requires_grad();
      const auto weight = in_memory_order(trains ? masters[i] : parameters[i].to(torch::kFloat));
      torch::Tensor& average = result.average[names[i]];
      if (step < 0) {
        average = weight;
      } else {
        average.mul_(kDecay).add_(weight, 1 - kDecay);
      }
      result.weights[names[i]] = weight;
    }
  };
  train_reference_in<Oddball>(
      {.ranks = ranks, .steps = steps, .dtype = dtype, .after_step = after_step});
  return result;
}

TEST(WeightAverageTest, HasTheBitsOfOneByHandAndASwapIsAsIfNothingHadHappened) {
  constexpr int kSteps = 4;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const int ranks : {1, 2, 3}) {
      const ByHand expected = by_hand(ranks, kSteps, dtype);
      for (const int stage : {0, 1, 2, 3}) {
        SCOPED_TRACE(c10::str(dtype, ", ", ranks, " ranks, stage ", stage));
        run_ranks(ranks, [&](World& world) {
          Trained run(world, Trained::options(stage, dtype));
          WeightAverage average(run.model, {.decay = kDecay});
          for (int step = 0; step < kSteps; ++step) {
            run.step(step, world.rank());
            average.update();
            if (step != 1) continue;
            average.swap_in();
            run.evaluate();
            average.swap_out();
          }
          expect_owned(expected.weights, run, "in the end");
          average.swap_in();
          expect_owned(expected.average, run, "while swapped in");
          // Whole weights are those of all ranks' shards.
          const GatheredParameters guard(run.model);
          const auto whole = in_memory_order(run.model->first->weight);
          EXPECT_TRUE(torch::equal(whole, expected.average.at("first.weight").to(dtype)));
        });
      }
    }
  }
}

TEST(WeightAverageTest, SwapsLoseNoBitOfAnyWayToKeepWeights) {
  const DiskFolder folder;
  const auto set = [&](int stage, const std::function<void(Options&)>& more) {
    Options options = Trained::options(stage, torch::kBFloat16);
    options.update_by = UpdateBy::kAuto;
    more(options);
    return options;
  };
  const std::vector<std::pair<const char*, Options>> ways = {
      {"split masters",
       set(3, [](auto& o) { o.low_precision_update = LowPrecisionUpdate::kSplitMasterWeights; })},
      {"no masters",
       set(2, [](auto& o) { o.low_precision_update = LowPrecisionUpdate::kNearest; })},
      {"small pages whole", set(3, [](auto& o) { o.minimum_sharded_bytes = 1024; })},
      {"masters on the host", set(1, [](auto& o) { o.offload.optimizer = Tier::kHost; })},
      {"fp32 on the host", set(2,
                               [](auto& o) {
                                 o.compute_dtype = std::nullopt;
                                 o.offload.optimizer = Tier::kHost;
                               })},
      {"all on NVMe", set(3, [&](auto& o) {
         o.offload.optimizer = o.offload.parameters = Tier::kNvme;
         o.offload.nvme_directory = folder.path();
       })}};
  for (const auto& [name, options] : ways) {
    SCOPED_TRACE(name);
    run_ranks(2, [&](World& world) {
      Trained run(world, options), undisturbed(world, options);
      WeightAverage average(run.model, {.decay = kDecay}),
          other(undisturbed.model, {.decay = kDecay});
      for (const int first : {0, 2}) {
        run.train(average, first, first + 2);
        undisturbed.train(other, first, first + 2);
        const auto own = exact_shards(run);
        average.swap_in();
        EXPECT_TRUE(average.is_swapped_in());
        run.evaluate();
        average.swap_out();
        expect_same_shards(own, exact_shards(run));
        expect_same_shards(exact_shards(undisturbed), exact_shards(run));
      }
      average.swap_in();
      other.swap_in();
      expect_same_shards(exact_shards(undisturbed), exact_shards(run));
      EXPECT_TRUE(torch::equal(run.evaluate(), undisturbed.evaluate()));
    });
  }
}

TEST(WeightAverageTest, HoldsFourBytesOfWhatTheRankOwnsAndGivesAllBack) {
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](World& world) {
      Trained run(world, Trained::options(stage, torch::kFloat));
      run.step(0);
      const auto held = [] { return Ledger::current()->now()[Kind::kOptimizerState]; };
      const int64_t before = held();
      int64_t owned = 0, parameters = 0;
      visit_owned_shards(run.model, [&](const OwnedShard& shard) {
        owned += shard.range.numel();
        ++parameters;
      });
      {
        WeightAverage average(run.model);
        // Padding of a page, and a block of the allocator's a page, at most.
        const int64_t most = 4 * owned + parameters * 512;
        EXPECT_GE(held() - before, 4 * owned);
        EXPECT_LE(held() - before, most);
        average.swap_in();
        EXPECT_LE(held() - before, 2 * most);
        average.swap_out();
        EXPECT_LE(held() - before, most);
      }
      EXPECT_EQ(held(), before);
    });
  }
}

// ---- in a state ----

// What a run of four steps has in the end: weights, and the average in their place.
std::pair<ByName, ByName> ends_of(Trained& run, WeightAverage& average) {
  const auto weights = exact_shards(run);
  average.swap_in();
  const auto averaged = exact_shards(run);
  average.swap_out();
  return {weights, averaged};
}

TEST(WeightAverageTest, GoesOnFromAStateAtAnotherStageAndNumberOfRanks) {
  const DiskFolder folder;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const bool asynchronous : {false, true}) {
      SCOPED_TRACE(c10::str(dtype, asynchronous ? ", beside training" : ""));
      const std::string states = folder.path() + c10::str("/", dtype, asynchronous);
      run_ranks(2, [&](World& world) {
        Trained run(world, Trained::options(1, dtype));
        WeightAverage average(run.model, {.decay = kDecay});
        run.train(average, 0, 2);
        StateSaver saver(states, world, {.asynchronous = asynchronous});
        saver.save(run.model, run.optimizer, {.step = 2, .average = &average});
        run.train(average, 2, 4);
        saver.wait();
      });
      for (const auto& [ranks, stage] : {std::pair(1, 0), std::pair(4, 3), std::pair(2, 2)}) {
        SCOPED_TRACE(c10::str(ranks, " ranks, stage ", stage));
        run_ranks(ranks, [&](World& world) {
          Trained uninterrupted(world, Trained::options(stage, dtype)),
              resumed(world, Trained::options(stage, dtype));
          WeightAverage its(uninterrupted.model, {.decay = kDecay}),
              own(resumed.model, {.decay = kDecay});
          uninterrupted.train(its, 0, 4);
          resumed.step(50);  // other weights than those of the beginning
          own.update();
          RunState state{.average = &own};
          load_state(states, resumed.model, resumed.optimizer, state);
          EXPECT_EQ(state.step, 2);
          resumed.train(own, 2, 4);
          const auto [weights, averaged] = ends_of(uninterrupted, its);
          const auto [weights_again, averaged_again] = ends_of(resumed, own);
          expect_same_shards(weights, weights_again);
          expect_same_shards(averaged, averaged_again);
        });
      }
    }
  }
}

TEST(WeightAverageTest, TheSameStateIsTheSameBytesWhateverItIsShardedOver) {
  const DiskFolder folder;
  const auto saved = [&](int ranks, int stage) {
    const std::string state = folder.path() + c10::str("/", ranks, "-", stage);
    run_ranks(ranks, [&](World& world) {
      Trained run(world, Trained::options(stage, torch::kBFloat16));
      WeightAverage average(run.model, {.decay = kDecay});
      run.train(average, 0, 2);
      save_state(state, run.model, run.optimizer, {.average = &average});
    });
    return files_of(state);
  };
  const auto files = saved(1, 0);
  EXPECT_EQ(files, saved(2, 3));
  EXPECT_EQ(files, saved(4, 1));
}

TEST(WeightAverageTest, IsExportedAsWeightsForAPlainModule) {
  const DiskFolder folder;
  for (const auto& [dtype, update] :
       {std::pair(torch::kFloat, LowPrecisionUpdate::kMasterWeights),
        std::pair(torch::kBFloat16, LowPrecisionUpdate::kMasterWeights),
        std::pair(torch::kBFloat16, LowPrecisionUpdate::kNearest)}) {
    const std::string weights = folder.path() + "/weights";
    Options options = Trained::options(3, dtype);
    options.low_precision_update = update;
    const Oddball plain = make<Oddball>();
    run_ranks(2, [&](World& world) {
      Trained run(world, options);
      WeightAverage average(run.model, {.decay = kDecay});
      run.train(average, 0, 2);
      const auto own = exact_shards(run);
      save_weights(weights, run.model, {.average = &average}, {.weights_as = WeightsAs::kAverage});
      expect_same_shards(own, exact_shards(run));
      if (world.rank() == 0) load_weights(weights, plain);
      world.communicator().barrier("loaded").wait();
      if (update == LowPrecisionUpdate::kNearest) return;
      average.swap_in();
      ByName whole;
      for (const auto& item : plain->named_parameters()) {
        if (item.key() != "last.weight") whole[item.key()] = in_memory_order(item.value());
      }
      expect_owned(whole, run, "as exported");
    });
    EXPECT_EQ(plain->first->weight.scalar_type(), torch::kFloat);
    if (update == LowPrecisionUpdate::kNearest) {
      const auto weight = plain->first->weight.detach();
      EXPECT_FALSE(torch::equal(weight, weight.to(torch::kBFloat16).to(torch::kFloat)))
          << "has digits of its own";
    }
  }
}

TEST(WeightAverageTest, WhatASaveOrALoadCannotKeepIsRefusedInWords) {
  const DiskFolder folder;
  run_ranks(2, [&](World& world) {
    const Options options = Trained::options(2, torch::kFloat);
    Trained run(world, options), other(world, options);
    WeightAverage average(run.model), of_other(other.model);
    run.train(average, 0, 1);
    const std::string with = folder.path() + "/with", without = folder.path() + "/without";
    const auto saves = [&](WeightAverage* of, const SaveOptions& how) {
      return error_of([&] { save_weights(with, run.model, {.average = of}, how); });
    };
    EXPECT_THAT(saves(nullptr, {.weights_as = WeightsAs::kAverage}),
                HasSubstr("needs RunState::average"));
    EXPECT_THAT(saves(&of_other, {}), HasSubstr("is of another model"));
    average.swap_in();
    EXPECT_THAT(
        error_of([&] { save_state(with, run.model, run.optimizer, {.average = &average}); }),
        HasSubstr("call WeightAverage::swap_out() first"));
    average.swap_out();
    WeightAverage* const of_rank = world.rank() == 0 ? &average : nullptr;
    EXPECT_THAT(error_of([&] { save_state(with, run.model, run.optimizer, {.average = of_rank}); }),
                HasSubstr("average of rank 0 is true, of rank 1 false"));

    save_state(with, run.model, run.optimizer, {.average = &average});
    save_state(without, run.model, run.optimizer);
    const auto loads = [&](const std::string& from, WeightAverage* of, bool strict = true) {
      return error_of([&] {
        RunState state{.average = of};
        const auto report = load_state(from, run.model, run.optimizer, state, {.strict = strict});
        EXPECT_TRUE(strict || report.missing.size() + report.unexpected.size() > 0);
      });
    };
    EXPECT_THAT(loads(without, &average),
                AllOf(HasSubstr("missing in it"), HasSubstr("first.weight:average")));
    EXPECT_THAT(loads(with, nullptr),
                AllOf(HasSubstr("unexpected"), HasSubstr("first.weight:average")));
    EXPECT_THAT(loads(with, &of_other), HasSubstr("is of another model"));
    EXPECT_EQ(loads(without, &average, false), "");
    EXPECT_EQ(loads(with, nullptr, false), "");
    EXPECT_EQ(loads(with, &average), "");
  });
}

// ---- misuse ----

TEST(WeightAverageTest, CallsInTheWrongOrderAreRefusedInWords) {
  run_ranks(2, [](World& world) {
    Trained run(world, Trained::options(3, torch::kFloat));
    WeightAverage average(run.model);
    EXPECT_THAT(error_of([&] { average.swap_out(); }), HasSubstr("call swap_in() first"));
    average.swap_in();
    EXPECT_THAT(error_of([&] { average.swap_in(); }), HasSubstr("call swap_out() first"));
    EXPECT_THAT(error_of([&] { average.update(); }), HasSubstr("call swap_out() first"));
    average.swap_out();
    for (const double decay : {-0.1, 1.0}) {
      EXPECT_THAT(error_of([&] { WeightAverage wrong(run.model, {.decay = decay}); }),
                  HasSubstr("expected a decay in [0, 1), got"));
    }
  });
}

TEST(WeightAverageTest, TrainingTheAverageIsFoundOutAndNothingIsLost) {
  for (const int stage : {0, 3}) {
    std::vector<std::string> said(2);
    run_ranks(2, [&](World& world) {
      Trained run(world, Trained::options(stage, torch::kFloat));
      WeightAverage average(run.model, {.decay = kDecay});
      run.train(average, 0, 2);
      average.swap_in();
      run.step(2);
      const auto trained = exact_shards(run);
      said[static_cast<size_t>(world.rank())] = error_of([&] { average.swap_out(); });
      expect_same_shards(trained, exact_shards(run));
    });
    EXPECT_THAT(said, Each(HasSubstr("was changed while the model had the average")));
  }
}

TEST(WeightAverageTest, GoesOnWhereFrozenWeightsBeginToTrain) {
  for (const int stage : {1, 2, 3}) {
    run_ranks(2, [&](World& world) {
      Trained run(world, Trained::options(stage, torch::kFloat));
      WeightAverage average(run.model, {.decay = kDecay});
      run.train(average, 0, 2);
      ByName expected;
      {
        const GatheredParameters guard(run.model);
        expected["frozen.weight"] = in_memory_order(run.model->frozen->weight);
      }
      for (auto& parameter : run.model->frozen->parameters()) parameter.requires_grad_(true);
      for (int step = 2; step < 4; ++step) {
        run.step(step);
        average.update();
        const GatheredParameters guard(run.model);
        expected["frozen.weight"].mul_(kDecay).add_(in_memory_order(run.model->frozen->weight),
                                                    1 - kDecay);
      }
      average.swap_in();
      const GatheredParameters guard(run.model);
      EXPECT_TRUE(
          torch::equal(in_memory_order(run.model->frozen->weight), expected["frozen.weight"]));
    });
  }
}

}  // namespace
}  // namespace zeropage::weight_average_test
