// Accumulation on an accelerator whose streams are late by random times: the host's bits and norms.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/device_ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_accumulation_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 3;
constexpr int64_t kMicroSteps = 3;
constexpr auto kLateBy = std::chrono::microseconds(200);

struct Result {
  std::vector<torch::Tensor> weights;  // on the host
  std::vector<double> norms;           // by step
  std::vector<Skipped> skipped;
};

Result train(const comm::World& world, const Options& options, const AccumulatorOptions& how) {
  const c10::Device device = world.device();
  DistributedDataParallel<Oddball> model(make_on<Oddball>(device), world, options);
  Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
  Accumulator accumulator(model, how);
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    for (int64_t micro_step = 0; micro_step < how.micro_steps; ++micro_step) {
      const auto index = static_cast<int>(step * how.micro_steps + micro_step);
      Samples samples = samples_of(world.rank(), index);
      // One rank's gradients are not finite in one micro-step of the second step.
      if (world.rank() == world.size() - 1 && step == 1 && micro_step == 1) {
        samples.inputs[0][0] = std::numeric_limits<double>::infinity();
      }
      const auto inputs = samples.inputs.to(device);
      const auto targets = samples.targets.to(device);
      accumulator.backward(torch::mse_loss(model(inputs).to(torch::kFloat), targets),
                           /*weight=*/static_cast<double>(micro_step + 1));
    }
    const StepReport report = accumulator.step(optimizer);
    result.norms.push_back(report.norm);
    result.skipped.push_back(report.skipped);
  }
  for (const auto& parameter : model.parameters()) {
    result.weights.push_back(parameter.detach().clone().cpu());
  }
  return result;
}

class DeviceAccumulationTest : public ::testing::TestWithParam<std::tuple<Carrier, int, int>> {
 protected:
  DeviceAccumulationTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    set_fake_delays(5, kLateBy);
  }
  ~DeviceAccumulationTest() override { set_fake_delays(0, {}); }

  Options options() const {
    Options options;
    options.update_by = UpdateBy::kClass;  // the host has the fused update, that device has not
    options.stage = stage_of(std::get<2>(GetParam()));
    options.page_bytes = 4_KiB;
    return options;
  }

  // order: where the carrier has a choice.
  void expect_the_hosts_bits(const Options& options, const AccumulatorOptions& how,
                             comm::ReductionOrder order = comm::ReductionOrder::kFast) const {
    const auto [carrier, ranks, stage] = GetParam();
    RankOptions on_devices = on_fake_devices(carrier, ranks);
    if (carrier == Carrier::kDevice) {
      on_devices.decorate = over_fake_backend(order);
    }
    std::vector<Result> expected(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](comm::World& world) {
      expected[static_cast<size_t>(world.rank())] = train(world, options, how);
    });
    run_ranks(
        ranks,
        [&](comm::World& world) {
          const Result result = train(world, options, how);
          const Result& host = expected[static_cast<size_t>(world.rank())];
          EXPECT_TRUE(same_bits(host.weights, result.weights)) << "rank " << world.rank();
          EXPECT_EQ(result.norms[0], host.norms[0]);
          EXPECT_EQ(result.norms[2], host.norms[2]);
          EXPECT_EQ(result.skipped, std::vector({Skipped::kNo, Skipped::kNotFinite, Skipped::kNo}));
        },
        on_devices);
  }
};

TEST_P(DeviceAccumulationTest, OfEachMicroStepHasTheHostsBits) {
  expect_the_hosts_bits(options(), {.micro_steps = kMicroSteps, .clip_norm = 0.1});
}

TEST_P(DeviceAccumulationTest, OfWholeGradientsHasTheHostsBits) {
  expect_the_hosts_bits(options(), {.micro_steps = kMicroSteps, .reduce = ReduceMicroSteps::kOnce});
}

TEST_P(DeviceAccumulationTest, InBfloat16HasTheHostsBits) {
  Options low = options();
  low.compute_dtype = torch::kBFloat16;
  expect_the_hosts_bits(low, {.micro_steps = kMicroSteps, .clip_value = 0.01});
}

TEST_P(DeviceAccumulationTest, InATreeHasTheHostsBits) {
  Options tree = options();
  tree.world_invariant = true;
  expect_the_hosts_bits(tree, {.micro_steps = 5}, comm::ReductionOrder::kFixed);
}

INSTANTIATE_TEST_SUITE_P(CarriersRanksStages, DeviceAccumulationTest,
                         ::testing::Combine(::testing::Values(Carrier::kStaged, Carrier::kDevice),
                                            ::testing::Values(1, 2), ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return c10::str(name(std::get<0>(info.param)), "Ranks",
                                           std::get<1>(info.param), "Stage",
                                           std::get<2>(info.param));
                         });

}  // namespace
}  // namespace zeropage::device_accumulation_test
