// What a script's own objects keep in a state.
#include <cmath>
#include <fstream>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/restarts.h"
#include "zeropage/saved_state.h"
#include "zeropage/saving.h"

namespace zeropage::run_extra_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// A schedule that is no LRScheduler: a warm-up, then a cosine.
class Schedule {
 public:
  explicit Schedule(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void step() {
    ++steps_;
    const double rate = steps_ < 3 ? 0.01 * steps_ : 0.02 * std::cos(0.1 * steps_);
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(rate);
  }
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  torch::optim::Optimizer& optimizer_;
  int64_t steps_ = 0;
};

RunExtra extra_of(Schedule& schedule) {
  return {[&schedule] { return std::to_string(schedule.steps()); },
          [&schedule](const std::string& text) { schedule.set_steps(std::stol(text)); }};
}

// LibTorch's classes save themselves so.
struct Sampler {
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("epoch", c10::IValue(epoch));
    archive.write("best", c10::IValue(best));
    archive.write("order", c10::IValue("shuffled"));
    archive.write("lengths", c10::IValue(lengths));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue value;
    archive.read("epoch", value);
    epoch = value.toInt();
    archive.read("best", value);
    best = value.toDouble();
    archive.read("lengths", value);
    lengths = value.toDoubleVector();
  }

  int64_t epoch = 0;
  double best = 0;
  std::vector<double> lengths = {};
};

struct Trained {
  Trained(World& world, int stage)
      : model(make<Oddball>(), world, Setting{stage, world.size()}.all()),
        optimizer(model, AdamWOptions(0.01)),
        schedule(optimizer) {}

  void train(int first, int end) {
    for (int step = first; step < end; ++step) {
      train_step(model, optimizer, step);
      schedule.step();
    }
  }
  std::vector<torch::Tensor> values() {
    std::vector<torch::Tensor> all;
    visit_parameters(model, [&](const std::string&, const torch::Tensor& values) {
      all.push_back(values.clone());
    });
    return all;
  }

  DistributedDataParallel<Oddball> model;
  Optimizer<AdamW> optimizer;
  Schedule schedule;
};

class RunExtraTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return disk_.path() + "/" + name; }

  const DiskFolder disk_;
};

TEST_F(RunExtraTest, LetsARunGoOnWithTheSameBitsByAScheduleOfTheScripts) {
  run_ranks(2, [&](World& world) {
    Trained run(world, 3);
    run.train(0, 4);
    save_state(path("step-4"), run.model, run.optimizer,
               {.step = 4, .extras = {{"schedule", extra_of(run.schedule)}}});
    run.train(4, 8);

    Trained again(world, 1);
    RunState state{.extras = {{"schedule", extra_of(again.schedule)}}};
    load_state(path("step-4"), again.model, again.optimizer, state);
    EXPECT_EQ(again.schedule.steps(), 4);
    again.train(4, 8);
    EXPECT_TRUE(same_bits(run.values(), again.values()));
  });
}

TEST_F(RunExtraTest, AreSavedBesideTrainingAsTheyWere) {
  run_ranks(2, [&](World& world) {
    Trained run(world, 2);
    run.train(0, 2);
    StateSaver saver(path("run"), world);
    saver.save(run.model, run.optimizer, {.extras = {{"schedule", extra_of(run.schedule)}}});
    run.train(2, 3);
    saver.wait();
    RunState state{.extras = {{"schedule", extra_of(run.schedule)}}};
    load_state(path("run"), run.model, run.optimizer, state);
    EXPECT_EQ(run.schedule.steps(), 2);
  });
}

TEST_F(RunExtraTest, AnObjectThatSavesItselfToAnArchiveIsTakenAsItIs) {
  run_ranks(2, [&](World& world) {
    Trained run(world, 1);
    Sampler sampler{
        .epoch = 3, .best = -std::numeric_limits<double>::infinity(), .lengths = {0.1, 2.5}};
    save_state(path("step-0"), run.model, run.optimizer,
               {.extras = {{"sampler", RunExtra::of(sampler)}}});
    Sampler fresh;
    RunState state{.extras = {{"sampler", RunExtra::of(fresh)}}};
    load_state(path("step-0"), run.model, run.optimizer, state);
    EXPECT_EQ(fresh.epoch, 3);
    EXPECT_EQ(fresh.best, sampler.best);
    EXPECT_EQ(fresh.lengths, sampler.lengths);
  });
}

TEST_F(RunExtraTest, WithoutAnyAStateHasTheBytesItAlwaysHad) {
  run_ranks(1, [&](World& world) {
    Trained run(world, 1);
    save_state(path("step-0"), run.model, run.optimizer);
    const state::SavedState saved(path("step-0"));
    EXPECT_FALSE(saved.manifest().content.at("progress").contains("extras"));
  });
}

TEST_F(RunExtraTest, OfOtherNamesThanTheStatesAreRefusedBeforeAnythingChanges) {
  run_ranks(2, [&](World& world) {
    Trained run(world, 3);
    run.train(0, 2);
    save_state(path("with"), run.model, run.optimizer,
               {.extras = {{"schedule", extra_of(run.schedule)}}});
    save_state(path("without"), run.model, run.optimizer);
    run.train(2, 3);
    const auto before = run.values();
    const auto refusal = [&](const std::string& name, RunState state) {
      return error_of([&] { load_state(path(name), run.model, run.optimizer, state); });
    };
    EXPECT_THAT(refusal("without", {.extras = {{"schedule", extra_of(run.schedule)}}}),
                HasSubstr("1 missing in it: RunState::extras[\"schedule\"]"));
    EXPECT_THAT(refusal("with", {}), HasSubstr("1 unexpected: RunState::extras[\"schedule\"]"));
    EXPECT_TRUE(same_bits(run.values(), before));
    EXPECT_EQ(run.schedule.steps(), 3);

    RunState state;
    const LoadReport report =
        load_state(path("with"), run.model, run.optimizer, state, {.strict = false});
    EXPECT_THAT(report.unexpected, ::testing::ElementsAre("RunState::extras[\"schedule\"]"));
    load_state(path("with"), run.model, run.optimizer);  // asks for nothing of the run
  });
}

TEST_F(RunExtraTest, WhatCannotBeKeptIsRefusedInWordsOnAllRanks) {
  struct WithTensor {
    void save(torch::serialize::OutputArchive& archive) const {
      archive.write("values", torch::ones({3}));
    }
    void load(torch::serialize::InputArchive&) {}
  } with_tensor;
  struct WithArchive {
    void save(torch::serialize::OutputArchive& archive) const {
      torch::serialize::OutputArchive inner;
      inner.write("epoch", c10::IValue(3));
      archive.write("inner", inner);
    }
    void load(torch::serialize::InputArchive&) {}
  } with_archive;
  run_ranks(2, [&](World& world) {
    Trained run(world, 1);
    const auto refusal = [&](const RunExtra& extra) {
      return error_of([&] {
        save_state(path("refused"), run.model, run.optimizer, {.extras = {{"mine", extra}}});
      });
    };
    const auto load = [](const std::string&) {};
    EXPECT_THAT(refusal({[] { return std::string("\xff\xfe"); }, load}),
                HasSubstr("RunState::extras[\"mine\"]: saves text that is no UTF-8"));
    EXPECT_THAT(refusal({nullptr, load}), HasSubstr("expected both functions, save and load"));
    EXPECT_THAT(refusal({[]() -> std::string { throw std::runtime_error("not now"); }, load}),
                HasSubstr("not now"));
    const std::string own = std::to_string(world.rank());
    EXPECT_THAT(refusal({[own] { return own; }, load}),
                HasSubstr("give the same RunState on all ranks"));
    EXPECT_THAT(refusal(RunExtra::of(with_tensor)), HasSubstr("saves a Tensor of itself"));
    EXPECT_THAT(refusal(RunExtra::of(with_archive)),
                HasSubstr("saves an archive \"inner\" within its own"));
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  });
}

TEST_F(RunExtraTest, ThatDoesNotTakeBackWhatItSavedIsNamed) {
  run_ranks(2, [&](World& world) {
    Trained run(world, 1);
    const RunExtra extra = {[] { return std::string("three"); },
                            [](const std::string& text) { static_cast<void>(std::stol(text)); }};
    save_state(path("step-0"), run.model, run.optimizer, {.extras = {{"mine", extra}}});
    RunState state{.extras = {{"mine", extra}}};
    EXPECT_THAT(error_of([&] { load_state(path("step-0"), run.model, run.optimizer, state); }),
                AllOf(HasSubstr("RunState::extras[\"mine\"]: does not take back what it saved"),
                      HasSubstr("half loaded")));
  });
}

}  // namespace
}  // namespace zeropage::run_extra_test
