// Below a limit on what a device's allocator reserves: what is forecast is what it then has, and what is chosen trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/device_ranks.h"
#include "tests/harness/errors.h"
#include "zeropage/bytes.h"
#include "zeropage/fit.h"
#include "zeropage/zeropage.h"

namespace zeropage::device_limits_test {
namespace {

using namespace memory;
using testing::Carrier;
using testing::error_of;
using testing::fake_memory;
using ::testing::HasSubstr;

// Each activation has 4 MiB, of which a segment of 20 MiB holds five.
constexpr int64_t kWidth = 64;
constexpr int64_t kRows = 16384;
constexpr int kLayers = 16;
constexpr ProductWorkspaces kWorkspaces = {.of_products = int64_t{8} << 20,
                                           .of_biased_products = int64_t{1} << 20};

torch::nn::Sequential make_layers() {
  torch::nn::Sequential layers;
  for (int layer = 0; layer < kLayers; ++layer) {
    layers->push_back(torch::nn::Linear(kWidth, kWidth));
    layers->push_back(torch::nn::GELU());
  }
  return layers;
}

at::Tensor sample() {
  return at::ones({kRows, kWidth});
}

class DeviceLimitsTest : public ::testing::TestWithParam<AllocatorSegments> {
 protected:
  static DeviceAllocator allocator() { return {.segments = GetParam(), .workspaces = kWorkspaces}; }

  // The plan of stage 0 on one rank.
  static Plan plan_layers(const comm::World& world, const DeviceAllocator& with) {
    return plan(make_layers, sample(), {.ranks = 1, .allocator = with},
                {.training = {.page_bytes = page_bytes_on(world.device())},
                 .tiers = {Tier::kDevice},
                 .stages = {0},
                 .policies = {CheckpointPolicy::kNone, CheckpointPolicy::kSelective}});
  }
  static Fitted fit_layers(const comm::World& world, int64_t limit_bytes,
                           const DeviceAllocator& with) {
    Options options;
    options.device_memory_bytes = limit_bytes;
    return fit(make_layers, sample(), world, options,
               {.stages = {0},
                .policies = {CheckpointPolicy::kNone, CheckpointPolicy::kSelective},
                .tiers = {Tier::kDevice},
                .allocator = with});
  }

  // The most that the device's allocator had, and the error of a step that found no memory.
  struct Trained {
    int64_t reserved_bytes = 0;
    std::string error;
  };
  static Trained train(const comm::World& world, CheckpointPolicy policy, int64_t limit_bytes = 0) {
    testing::set_fake_workspaces(kWorkspaces);
    const bool grow = GetParam() == AllocatorSegments::kExpandable;
    testing::set_fake_segments(0, {.expandable_segments = grow, .limit_bytes = limit_bytes});
    Trained trained;
    trained.error = error_of([&] { step_twice(world, policy); });
    trained.reserved_bytes = fake_memory(0).peak_reserved_bytes;
    testing::set_fake_workspaces({});
    testing::finish_fake_work();
    return trained;
  }

 private:
  static void step_twice(const comm::World& world, CheckpointPolicy policy) {
    DeferredModule<torch::nn::Sequential> deferred([] { return make_layers(); });
    DistributedDataParallel<torch::nn::Sequential> model(std::move(deferred), world, Options());
    Optimizer<torch::optim::AdamW> optimizer(model);
    Accumulator accumulator(model);
    checkpointing::Recompute recompute(checkpointing::RecomputeOptions::selective());
    const at::Tensor inputs = sample().to(world.device());
    for (int step = 0; step < 2; ++step) {
      at::Tensor loss;
      {
        std::optional<ActivationScope> scope;
        if (policy == CheckpointPolicy::kSelective) scope.emplace(recompute);
        loss = model(inputs).mean(at::kFloat);
      }
      accumulator.backward(loss);
      accumulator.step(optimizer);
    }
  }
};

TEST_P(DeviceLimitsTest, ReservesWhatIsForecast) {
  testing::on_devices(Carrier::kStaged, 1, [](comm::World& world) {
    const Plan planned = plan_layers(world, allocator());
    ASSERT_EQ(planned.forecasts.size(), 2U);
    for (const Forecast& forecast : planned.forecasts) {
      SCOPED_TRACE(to_string(forecast.setting));
      const Trained trained = train(world, forecast.setting.checkpointing);
      EXPECT_EQ(trained.error, "");
      // The batch is in no plan, and takes a segment.
      constexpr int64_t kOfTheBatch = 20_MiB;
      EXPECT_GE(trained.reserved_bytes, forecast.reserved_bytes);
      EXPECT_LE(trained.reserved_bytes, forecast.reserved_bytes + kOfTheBatch);
    }
  });
}

// A limit that tensors alone keep below.
TEST_P(DeviceLimitsTest, FitsWhatIsReserved) {
  testing::on_devices(Carrier::kStaged, 1, [](comm::World& world) {
    const DeviceAllocator tensors_alone{.segments = AllocatorSegments::kNone};
    const Plan planned = plan_layers(world, tensors_alone);
    ASSERT_EQ(planned.forecasts.front().setting.checkpointing, CheckpointPolicy::kNone);
    const int64_t limit_bytes = planned.forecasts.front().at_peak[Tier::kDevice].total() * 21 / 20;
    const Fitted too_large = fit_layers(world, limit_bytes, tensors_alone);
    EXPECT_EQ(too_large.checkpointing, CheckpointPolicy::kNone);
    EXPECT_THAT(train(world, too_large.checkpointing, limit_bytes).error,
                HasSubstr("is out of memory in segments"));
    const Fitted fitted = fit_layers(world, limit_bytes, allocator());
    EXPECT_EQ(fitted.checkpointing, CheckpointPolicy::kSelective);
    EXPECT_THAT(fitted.description, HasSubstr(" reserved on device"));
    const Trained trained = train(world, fitted.checkpointing, limit_bytes);
    EXPECT_EQ(trained.error, "") << fitted.description;
    EXPECT_LE(trained.reserved_bytes, limit_bytes) << fitted.description;
  });
}

INSTANTIATE_TEST_SUITE_P(Segments, DeviceLimitsTest,
                         ::testing::Values(AllocatorSegments::kExpandable,
                                           AllocatorSegments::kFixed),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace zeropage::device_limits_test
