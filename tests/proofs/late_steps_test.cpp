// Steps of an accumulator that nothing in the gradients decides: enqueued on an accelerator whose streams
// are late by random times, left out by the device where a gradient is not finite, and told of later. The
// host's bits, norms and verdicts.
#include <future>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "operators/tensor_mark.h"
#include "optim/flat_norm.h"
#include "optim/norm_table.h"
#include "parallel/slice_mark.h"
#include "tests/harness/device_ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/fused_update.h"
#include "zeropage/zeropage.h"

namespace zeropage::late_steps_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kSteps = 5;
constexpr int kBadStep = 1;
constexpr int64_t kMicroSteps = 2;
constexpr auto kLateBy = std::chrono::microseconds(200);

// Stands for the fused update, whose kernels that device has not: it reads the flag on the device. Its
// rate is 1 / (10 x its steps), so a step that is counted wrongly shows in the bits.
class FlaggedUpdate final : public zero::PageUpdate {
 public:
  explicit FlaggedUpdate(zero::OwnedPart part) : part_(std::move(part)) {}

  void add_groups(std::vector<zero::OwnedGroup> groups) override {
    for (const zero::OwnedGroup& group : groups) {
      slices_.insert(slices_.end(), group.shards.begin(), group.shards.end());
    }
  }
  void set_options(size_t /*group*/, const torch::optim::OptimizerOptions&) override {}
  bool reads_found_inf() const override { return true; }
  void uncount_step() override { --steps_; }
  void visit_states(zero::StateAccess /*access*/, const VisitState& /*visit*/) override {}
  void visit_memory(const zero::VisitMemory& /*visit*/) override {}
  void set_updates(int64_t updates) override { steps_ = updates; }

  void step(const torch::Tensor& of_part, const zero::HasGradient& has_gradient,
            const optim::GradientFactors& factors,
            const zero::Directions& /*directions*/) override {
    ++steps_;
    for (const zero::ParameterShard& slice : slices_) {
      if (slice.range.empty() || !has_gradient(slice.parameter)) continue;
      auto values = part_.values.narrow(0, slice.range.begin, slice.range.numel());
      const auto gradient = of_part.narrow(0, slice.range.begin, slice.range.numel());
      const auto updated = values - gradient * factors.scale * (0.1 / static_cast<double>(steps_));
      values.copy_(factors.found_inf.defined() ? at::where(factors.found_inf.ne(0), values, updated)
                                               : updated);
    }
  }

 private:
  const zero::OwnedPart part_;
  std::vector<zero::ParameterShard> slices_;
  int64_t steps_ = 0;
};

class FlaggedOptimizer final : public ShardedOptimizer {
 public:
  template <typename Module>
  explicit FlaggedOptimizer(DistributedDataParallel<Module>& model)
      : ShardedOptimizer(model, {{model.parameters()}},
                         {.class_name = "Flagged",
                          .make_class_optimizer =
                              [](Groups groups) {
                                return std::make_unique<SGD>(std::move(groups), SGDOptions(0.1));
                              },
                          .fused = std::make_shared<const zero::FusedForm>(zero::FusedForm{
                              .make =
                                  [](zero::OwnedPart part) {
                                    return std::make_unique<FlaggedUpdate>(std::move(part));
                                  },
                              .states = 0}),
                          .defaults = std::make_unique<SGDOptions>(0.1)}) {}
};

Options options_of(int stage) {
  Options options;
  options.update_by = UpdateBy::kFused;  // which FlaggedUpdate is
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  return options;
}

template <typename Module>
void backwards(DistributedDataParallel<Module>& model, Accumulator& accumulator, int step,
               bool spoil) {
  const comm::World& world = model.world();
  for (int64_t micro_step = 0; micro_step < kMicroSteps; ++micro_step) {
    Samples samples = samples_of(
        world.rank(), step * static_cast<int>(kMicroSteps) + static_cast<int>(micro_step));
    if (spoil && world.rank() == world.size() - 1) {
      samples.inputs[0][0] = std::numeric_limits<double>::infinity();
    }
    const auto inputs = samples.inputs.to(world.device());
    const auto targets = samples.targets.to(world.device());
    accumulator.backward(torch::mse_loss(model(inputs), targets),
                         /*weight=*/static_cast<double>(micro_step + 1));
  }
}

// When a program reads what a report says.
enum class Reads : uint8_t { kAtOnce, kOneStepLater, kAtTheEnd };

struct Result {
  std::vector<torch::Tensor> weights;  // on the host
  std::vector<double> norms;           // by step
  std::vector<std::string> verdicts;
  std::vector<std::vector<std::string>> not_finite;
  int64_t optimizer_steps = 0;
  int64_t skipped_steps = 0;  // as the scaler has counted
};

Result train(const comm::World& world, const Options& options, Reads reads) {
  DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world, options);
  FlaggedOptimizer optimizer(model);
  Accumulator accumulator(model, {.micro_steps = kMicroSteps});
  Result result;
  std::vector<EnqueuedStep> unread;
  const auto read = [&](size_t left) {
    for (; unread.size() > left; unread.erase(unread.begin())) {
      const StepReport& report = unread.front().report();
      result.norms.push_back(report.norm);
      result.verdicts.push_back(report.stepped() ? "stepped" : report.to_string());
      result.not_finite.push_back(report.not_finite);
      EXPECT_EQ(report.weight, 3.0 * world.size());
    }
  };
  for (int step = 0; step < kSteps; ++step) {
    backwards(model, accumulator, step, step == kBadStep);
    unread.push_back(accumulator.enqueue_step(optimizer));
    if (reads != Reads::kAtTheEnd) read(reads == Reads::kAtOnce ? 0 : 1);
  }
  read(0);
  result.optimizer_steps = optimizer.steps();
  result.skipped_steps = accumulator.loss_scaler().skipped_steps();
  for (const auto& parameter : model.parameters()) {
    result.weights.push_back(parameter.detach().clone().cpu());
  }
  return result;
}

class LateStepsTest : public ::testing::TestWithParam<std::tuple<Carrier, int, int>> {
 protected:
  LateStepsTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    set_fake_delays(5, kLateBy);
  }
  ~LateStepsTest() override { set_fake_delays(0, {}); }
};

TEST_P(LateStepsTest, HaveTheHostsBitsNormsAndVerdictsWheneverTheyAreRead) {
  const auto [carrier, ranks, stage] = GetParam();
  const Options options = options_of(stage);
  std::vector<Result> expected(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](comm::World& world) {
    expected[static_cast<size_t>(world.rank())] = train(world, options, Reads::kAtOnce);
  });
  for (const Reads reads : {Reads::kAtOnce, Reads::kOneStepLater, Reads::kAtTheEnd}) {
    on_devices(carrier, ranks, [&](comm::World& world) {
      const Result result = train(world, options, reads);
      const Result& host = expected[static_cast<size_t>(world.rank())];
      EXPECT_TRUE(same_bits(host.weights, result.weights)) << "rank " << world.rank();
      for (int step = 0; step < kSteps; ++step) {
        const auto at = static_cast<size_t>(step);
        if (step != kBadStep) {
          EXPECT_EQ(result.norms[at], host.norms[at]) << "step " << step;
        }
        EXPECT_EQ(result.verdicts[at] == "stepped", step != kBadStep) << "step " << step;
      }
      EXPECT_FALSE(std::isfinite(result.norms[kBadStep]));
      EXPECT_EQ(result.verdicts, host.verdicts);
      EXPECT_EQ(result.not_finite, host.not_finite);
      EXPECT_EQ(result.optimizer_steps, kSteps - 1);
      EXPECT_EQ(host.optimizer_steps, kSteps - 1);
      EXPECT_EQ(result.skipped_steps, 1);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(CarriersRanksStages, LateStepsTest,
                         ::testing::Combine(::testing::Values(Carrier::kStaged, Carrier::kDevice),
                                            ::testing::Values(1, 2), ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return c10::str(name(std::get<0>(info.param)), "Ranks",
                                           std::get<1>(info.param), "Stage",
                                           std::get<2>(info.param));
                         });

class LateStepTest : public ::testing::Test {
 protected:
  LateStepTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
  }
};

c10::Stream compute_of(const comm::World& world) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getStream(world.device());
}

// Whether step() returns while the device has not begun with the gradients.
bool returns_before_its_gradients(int stage, const AccumulatorOptions& how) {
  bool returned = false;
  on_devices(Carrier::kStaged, 1, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world,
                                           options_of(stage));
    FlaggedOptimizer optimizer(model);
    Accumulator accumulator(model, how);
    auto held = std::make_unique<HeldStream>(compute_of(world));
    std::promise<void> stepped;
    auto told = stepped.get_future();
    // Whoever waits for a held stream does so until it is let go.
    auto release = std::async(std::launch::async, [&] {
      returned = told.wait_for(std::chrono::seconds(2)) == std::future_status::ready;
      held.reset();
    });
    backwards(model, accumulator, 0, /*spoil=*/false);
    const EnqueuedStep step = accumulator.enqueue_step(optimizer);
    stepped.set_value();
    release.get();
    EXPECT_TRUE(step.report().stepped());
    EXPECT_GT(step.report().norm, 0);
  });
  return returned;
}

TEST_F(LateStepTest, ReturnsWhileTheDeviceHasNotBegunWithItsGradients) {
  for (const int stage : {0, 1, 2, 3}) {
    EXPECT_TRUE(returns_before_its_gradients(stage, {.micro_steps = kMicroSteps})) << stage;
  }
}

TEST_F(LateStepTest, WaitsWhereTheGradientsDecide) {
  EXPECT_FALSE(returns_before_its_gradients(0, {.micro_steps = kMicroSteps, .clip_norm = 1.0}));
  EXPECT_FALSE(returns_before_its_gradients(
      0, {.micro_steps = kMicroSteps, .loss_scaler = accumulate::LossScalerOptions{}}));
}

TEST_F(LateStepTest, KeepsItsReportBeyondTheAccumulatorAndTheModel) {
  on_devices(Carrier::kStaged, 1, [&](comm::World& world) {
    std::optional<EnqueuedStep> step;
    {
      DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world,
                                             options_of(1));
      FlaggedOptimizer optimizer(model);
      Accumulator accumulator(model, {.micro_steps = kMicroSteps});
      backwards(model, accumulator, 0, /*spoil=*/true);
      step = accumulator.enqueue_step(optimizer);
    }
    EXPECT_EQ(step->report().skipped, Skipped::kNotFinite);
    EXPECT_THAT(step->report().not_finite, ::testing::Contains("first.weight"));
  });
}

// ---- with slices of a parameter: ranks 0 and 1 have one each, 2 and 3 the same with other samples ----

// It counts as a slice, but operators take it as it is.
class MarkOfWhole final : public parallel::SliceMark {
 public:
  using SliceMark::SliceMark;
  bool replaces(const c10::OperatorHandle& /*handle*/) const override { return false; }
  bool run(const c10::OperatorHandle& /*handle*/, const at::Tensor& /*marked*/,
           torch::jit::Stack& /*stack*/) override {
    return false;
  }
};

// The first weight counts as a slice; nothing is sent for it in forward.
std::pair<std::vector<double>, std::vector<std::vector<std::string>>> train_slices(
    const comm::World& all, const c10::intrusive_ptr<c10d::HashStore>& store) {
  const auto axis = [&](const std::string& name, int rank) {
    return comm::World({.rank = rank,
                        .world_size = 2,
                        .local_rank = all.rank(),
                        .local_world_size = all.size(),
                        .launcher = "threads"},
                       c10::make_intrusive<c10d::PrefixStore>(name, store),
                       {.device = all.device().type(), .transport = comm::Transport::kShared});
  };
  const comm::World group = axis(c10::str("group", all.rank() / 2), all.rank() % 2);
  const comm::World data = axis(c10::str("data", all.rank() % 2), all.rank() / 2);
  Oddball module = make_on<Oddball>(all.device());
  const int64_t rows = module->first->weight.size(0);
  operators::set_mark(
      module->first->weight,
      c10::make_intrusive<MarkOfWhole>("a slice", parallel::ranks_of(group),
                                       parallel::SlicedDimension(parallel::Slices(
                                           rows * group.size(), rows, group.size(), "a weight"))));
  DistributedDataParallel<Oddball> model(module, data, options_of(1));
  FlaggedOptimizer optimizer(model);
  Accumulator accumulator(model, {.micro_steps = kMicroSteps});
  std::pair<std::vector<double>, std::vector<std::vector<std::string>>> told;
  for (int step = 0; step < kSteps; ++step) {
    backwards(model, accumulator, step, step == kBadStep && group.rank() == 1);
    const StepReport report = accumulator.enqueue_step(optimizer).report();
    told.first.push_back(report.norm);
    told.second.push_back(report.not_finite);
  }
  EXPECT_EQ(optimizer.steps(), kSteps - 1);
  return told;
}

TEST_F(LateStepTest, IsToldOfSlicesAsTheHostIs) {
  std::pair<std::vector<double>, std::vector<std::vector<std::string>>> expected;
  run_ranks(4, [&, store = c10::make_intrusive<c10d::HashStore>()](comm::World& world) {
    const auto told = train_slices(world, store);
    if (world.rank() == 0) expected = told;
  });
  EXPECT_THAT(expected.second[kBadStep], ::testing::Contains("first.weight"));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_devices(Carrier::kStaged, 4, [&](comm::World& world) {
    const auto [norms, not_finite] = train_slices(world, store);
    for (int step = 0; step < kSteps; ++step) {
      const auto at = static_cast<size_t>(step);
      if (step == kBadStep) continue;
      EXPECT_EQ(norms[at], expected.first[at]) << "step " << step;
    }
    EXPECT_EQ(not_finite, expected.second);
  });
}

// ---- the norm of offloaded gradients, and of groups ----

TEST_F(LateStepTest, OffloadedStepsAreSkippedBeforeTheyAreMade) {
  const auto train_offloaded = [](const comm::World& world, int stage) {
    Options options;
    options.stage = stage_of(stage);
    options.page_bytes = 4_KiB;
    options.offload.optimizer = memory::Tier::kHost;
    DistributedDataParallel<Oddball> model(make_on<Oddball>(world.device()), world, options);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
    Accumulator accumulator(model, {.micro_steps = kMicroSteps});
    std::vector<std::string> told;
    for (int step = 0; step < kSteps; ++step) {
      backwards(model, accumulator, step, step == kBadStep);
      told.push_back(accumulator.step(optimizer).to_string());
    }
    std::vector<torch::Tensor> weights;
    for (const auto& parameter : model.parameters()) {
      weights.push_back(parameter.detach().clone().cpu());
    }
    return std::pair(weights, told);
  };
  for (const int stage : {0, 2, 3}) {
    for (const int ranks : {1, 2}) {
      std::vector<std::pair<std::vector<torch::Tensor>, std::vector<std::string>>> expected(
          static_cast<size_t>(ranks));
      run_ranks(ranks, [&](comm::World& world) {
        expected[static_cast<size_t>(world.rank())] = train_offloaded(world, stage);
      });
      on_devices(Carrier::kDevice, ranks, [&](comm::World& world) {
        const auto& [weights, told] = expected[static_cast<size_t>(world.rank())];
        const auto [of_device, told_by_device] = train_offloaded(world, stage);
        EXPECT_TRUE(same_bits(weights, of_device)) << "stage " << stage << ", ranks " << ranks;
        EXPECT_EQ(told, told_by_device);
        EXPECT_THAT(told[kBadStep], ::testing::HasSubstr("not finite"));
      });
    }
  }
}

// Every other element of `parts` parameters to each of two sums.
std::vector<optim::NormPart> many_parts(int64_t parts, int64_t numel) {
  std::vector<optim::NormPart> all;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * numel / parts;
    const int64_t end = (part + 1) * numel / parts;
    all.push_back({.begin = begin, .numel = end - begin, .sum = part % 2, .flag = part});
  }
  return all;
}

TEST_F(LateStepTest, NormsAreMadeByAsManyOperatorsHoweverManyParametersThereAre) {
  const c10::Device device = fake_device();
  const int64_t numel = 30000;
  auto gradient = torch::randn({numel}) * torch::pow(2.0, torch::randint(-100, 60, {numel}));
  gradient[777] = std::numeric_limits<float>::infinity();
  gradient[29000] = std::numeric_limits<float>::quiet_NaN();
  const auto there = gradient.to(device);
  std::vector<int64_t> launches;
  for (const int64_t parts : {2, 50, 400}) {
    const optim::NormSizes sizes{.sums = 2, .flags = parts};
    const optim::NormTable table(many_parts(parts, numel), sizes, device);
    const auto words = sizes.make_words(device);
    finish_fake_work();
    reset_fake_counters();
    table.add_squares(there, words);
    EXPECT_EQ(fake_counters().host_syncs, 0);
    EXPECT_EQ(fake_counters().not_async, 0);
    launches.push_back(fake_counters().launches);
    const auto on_host = words.cpu();

    const optim::NormTable of_host(many_parts(parts, numel), sizes, c10::kCPU);
    const auto expected = sizes.make_words(c10::kCPU);
    of_host.add_squares(gradient, expected);
    const auto* const first = on_host.const_data_ptr<int64_t>();
    const auto* const expected_first = expected.const_data_ptr<int64_t>();
    for (int64_t sum = 0; sum < 2; ++sum) {
      EXPECT_EQ(sizes.sum(first, sum).words(), sizes.sum(expected_first, sum).words()) << parts;
    }
    for (int64_t flag = 0; flag < parts; ++flag) {
      EXPECT_EQ(sizes.flag(first, flag), sizes.flag(expected_first, flag)) << flag;
    }
  }
  EXPECT_EQ(launches[0], launches[1]);
  EXPECT_EQ(launches[0], launches[2]);
}

}  // namespace
}  // namespace zeropage::late_steps_test
