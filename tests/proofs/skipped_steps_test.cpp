// A step that is skipped is skipped on all ranks and leaves no trace: weights and optimizer state
// are, bit for bit, those of a run that never had it.
#include <limits>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/accumulated.h"
#include "tests/harness/ranks.h"

namespace zeropage::skipped_steps_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kMicroSteps = 3;
constexpr int kBadStep = 1;
constexpr int kSteps = 4;

// One element of one rank's gradient of a parameter, in one micro-step.
struct Fault {
  int rank;
  int micro_step;
  double value;
};

const std::vector<Fault> kFaults = {{0, 0, std::numeric_limits<double>::infinity()},
                                    {1, 2, std::numeric_limits<double>::quiet_NaN()}};

class SkippedStepsTest : public ::testing::TestWithParam<std::tuple<int, int, ReduceMicroSteps>> {
 protected:
  SkippedStepsTest() { at::set_num_threads(1); }
  int ranks() const { return std::get<0>(GetParam()); }
  Options options() const {
    Options options;
    options.stage = stage_of(std::get<1>(GetParam()));
    options.page_bytes = 4_KiB;
    return options;
  }
  AccumulatorOptions accumulation() const {
    return {.micro_steps = kMicroSteps, .reduce = std::get<2>(GetParam())};
  }
};

void backwards(DistributedDataParallel<Oddball>& model, Accumulator& accumulator, int step,
               double weight = 1) {
  const comm::World& world = model.world();
  for (int micro = 0; micro < kMicroSteps; ++micro) {
    const Samples samples = samples_of(micro * world.size() + world.rank(), step);
    accumulator.backward(loss_of(model(samples.inputs).to(torch::kFloat), samples), weight);
  }
}

using AtBadStep =
    std::function<void(DistributedDataParallel<Oddball>&, Accumulator&, Optimizer<AdamW>&)>;

// All parameters after steps of which the second is done by `at_bad_step`.
std::vector<std::vector<torch::Tensor>> train(int ranks, const Options& options,
                                              const AccumulatorOptions& accumulation,
                                              const AtBadStep& at_bad_step) {
  std::vector<std::vector<torch::Tensor>> by_rank(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_seeded<Oddball>(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, accumulation);
    for (int step = 0; step < kSteps; ++step) {
      if (step == kBadStep) {
        at_bad_step(model, accumulator, optimizer);
        continue;
      }
      backwards(model, accumulator, step);
      const StepReport report = accumulator.step(optimizer);
      EXPECT_TRUE(report.stepped()) << report.to_string();
    }
    by_rank[static_cast<size_t>(world.rank())] = copies_of(model.parameters());
  });
  return by_rank;
}

void expect_same(const std::vector<std::vector<torch::Tensor>>& expected,
                 const std::vector<std::vector<torch::Tensor>>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    EXPECT_TRUE(same_bits(expected[rank], actual[rank])) << "rank " << rank;
    EXPECT_TRUE(same_bits(expected[0], actual[rank])) << "ranks 0 and " << rank;
  }
}

// The bad step with that fault in the gradient of "strided", which must be skipped.
AtBadStep faulty_step(const Fault& fault, double loss_scale, double next_loss_scale) {
  return [=](DistributedDataParallel<Oddball>& model, Accumulator& accumulator,
             Optimizer<AdamW>& optimizer) {
    const auto before = copies_of(model.parameters());
    int micro = 0;
    const unsigned hook = model->strided.register_hook([&](torch::Tensor gradient) {
      if (model.world().rank() == fault.rank && micro == fault.micro_step) {
        gradient = gradient.clone();
        gradient[10][12] = fault.value;
      }
      ++micro;
      return gradient;
    });
    backwards(model, accumulator, kBadStep);
    EXPECT_EQ(micro, kMicroSteps);
    model->strided.remove_hook(hook);
    const StepReport report = accumulator.step(optimizer);
    EXPECT_EQ(report.skipped, Skipped::kNotFinite) << report.to_string();
    EXPECT_EQ(report.not_finite, std::vector<std::string>{"strided"});
    EXPECT_THAT(report.to_string(),
                HasSubstr("the gradient of parameter \"strided\" is not finite"));
    EXPECT_EQ(report.loss_scale, loss_scale);
    EXPECT_EQ(report.next_loss_scale, next_loss_scale);
    EXPECT_EQ(accumulator.loss_scaler().scale(), next_loss_scale);
    EXPECT_TRUE(same_bits(before, copies_of(model.parameters())));
  };
}

TEST_P(SkippedStepsTest, WithWhatIsNotFiniteOnOneRankLeaveNoTrace) {
  const auto expected = train(ranks(), options(), accumulation(), [](auto&, auto&, auto&) {});
  for (const Fault& fault : kFaults) {
    expect_same(expected, train(ranks(), options(), accumulation(), faulty_step(fault, 1, 1)));
  }
}

TEST_P(SkippedStepsTest, OfHalfLowerTheScaleAndLeaveNoOtherTrace) {
  Options half = options();
  half.compute_dtype = torch::kHalf;
  AccumulatorOptions scaled = accumulation();
  scaled.loss_scaler = accumulate::LossScalerOptions{.initial_scale = 256};
  const auto expected = train(ranks(), half, scaled, [](auto&, Accumulator& accumulator, auto&) {
    accumulator.loss_scaler().update(/*found_inf=*/true);
  });
  for (const Fault& fault : kFaults) {
    expect_same(expected, train(ranks(), half, scaled, faulty_step(fault, 256, 128)));
  }
}

TEST_P(SkippedStepsTest, WithoutWeightOnAnyRankLeaveNoTrace) {
  const auto expected = train(ranks(), options(), accumulation(), [](auto&, auto&, auto&) {});
  const auto weightless = [](auto& model, Accumulator& accumulator, auto& optimizer) {
    const auto before = copies_of(model.parameters());
    for (int micro = 0; micro < kMicroSteps; ++micro) {
      const Samples samples = samples_of(micro, kBadStep);
      accumulator.backward(
          loss_of(model(samples.inputs), samples) * std::numeric_limits<double>::quiet_NaN(),
          /*weight=*/0);
    }
    EXPECT_FALSE(accumulator.loss().defined());
    const StepReport report = accumulator.step(optimizer);
    EXPECT_EQ(report.skipped, Skipped::kNoWeight) << report.to_string();
    EXPECT_EQ(report.weight, 0);
    EXPECT_TRUE(same_bits(before, copies_of(model.parameters())));
  };
  expect_same(expected, train(ranks(), options(), accumulation(), weightless));
}

// What counts for nothing must not count later either.
TEST_P(SkippedStepsTest, AreNotMadeByMicroBatchesWithoutWeight) {
  const auto bad_step = [](bool with_nan) {
    return [with_nan](auto& model, Accumulator& accumulator, auto& optimizer) {
      for (int micro = 0; micro < kMicroSteps; ++micro) {
        const Samples samples = samples_of(micro, kBadStep);
        auto loss = loss_of(model(samples.inputs), samples);
        const bool empty = micro == 1 || model.world().rank() == 0;
        if (empty && with_nan) loss = loss * std::numeric_limits<double>::quiet_NaN();
        accumulator.backward(loss, empty ? 0 : 5);
      }
      const StepReport report = accumulator.step(optimizer);
      EXPECT_TRUE(report.stepped()) << report.to_string();
      EXPECT_EQ(report.weight, 10 * (model.world().size() - 1));
    };
  };
  expect_same(train(ranks(), options(), accumulation(), bad_step(false)),
              train(ranks(), options(), accumulation(), bad_step(true)));
}

INSTANTIATE_TEST_SUITE_P(RanksStagesPolicies, SkippedStepsTest,
                         ::testing::Combine(::testing::Values(2, 3), ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(ReduceMicroSteps::kEach,
                                                              ReduceMicroSteps::kOnce)));

// ---- restart ----

template <typename State>
std::string saved(const State& state) {
  std::ostringstream out;
  torch::save(state, out);
  return out.str();
}

template <typename State>
void load(State& state, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(state, in);
}

// The verdicts of steps [begin, end) on known gradients, whose norms jump now and then.
std::vector<std::string> verdicts(Accumulator& accumulator, DistributedDataParallel<Ragged>& model,
                                  Optimizer<AdamW>& optimizer, int begin, int end) {
  std::vector<std::string> lines;
  for (int step = begin; step < end; ++step) {
    double size = step % 7 == 6 ? 1000 : 1 + 0.01 * (step % 3);
    if (step % 5 == 4) size = std::numeric_limits<double>::infinity();
    accumulator.backward(size * loss_with_known_gradients(model.named_parameters(), 0));
    const StepReport report = accumulator.step(optimizer);
    lines.push_back(c10::str(report.to_string(), " ", report.next_loss_scale));
  }
  return lines;
}

TEST(AccumulatorRestartTest, ContinuesTheScaleAndTheWindowOfNormsWhereTheyWereSaved) {
  const AccumulatorOptions options{
      .loss_scaler = accumulate::LossScalerOptions{.initial_scale = 1024, .growth_interval = 3},
      .norm_spikes = accumulate::NormSpikeOptions{.window = 8, .z_score = 4, .warm_up = 3}};
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Ragged> model(Ragged(), world);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, options);
    verdicts(accumulator, model, optimizer, 0, 11);
    const std::string scaler = saved(accumulator.loss_scaler());
    const std::string spikes = saved(*accumulator.norm_spikes());
    const auto expected = verdicts(accumulator, model, optimizer, 11, 22);
    EXPECT_THAT(expected, ::testing::Contains(HasSubstr("is a spike")));
    EXPECT_THAT(expected, ::testing::Contains(HasSubstr("not finite")));
    EXPECT_THAT(expected, ::testing::Contains(HasSubstr("stepped")));

    Accumulator resumed(model, options);
    load(resumed.loss_scaler(), scaler);
    load(*resumed.norm_spikes(), spikes);
    EXPECT_EQ(verdicts(resumed, model, optimizer, 11, 22), expected);
    Accumulator anew(model, options);
    EXPECT_NE(verdicts(anew, model, optimizer, 11, 22), expected);
  });
}

}  // namespace
}  // namespace zeropage::skipped_steps_test
