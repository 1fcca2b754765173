#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/harness/errors.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/ranks.h"
#include "zeropage/device.h"
#include "zeropage/world.h"

namespace zeropage::comm::device_world_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::fake_device;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using testing::try_ranks;

constexpr c10::DeviceType kFake = c10::DeviceType::PrivateUse1;

class DeviceWorldTest : public ::testing::Test {
 protected:
  DeviceWorldTest() { testing::register_fake_accelerator(); }

  // A world of one.
  static World alone(const WorldOptions& options) {
    return {{.launcher = "test"}, c10::make_intrusive<c10d::HashStore>(), options};
  }
};

TEST_F(DeviceWorldTest, ARanksDeviceIsItsLocalRankModuloWhatItSees) {
  run_ranks(testing::kFakeDevices + 1,
            [](World& world) {
              const auto index =
                  static_cast<c10::DeviceIndex>(world.local_rank() % testing::kFakeDevices);
              EXPECT_EQ(world.device(), fake_device(index));
              // Factories without an index take it.
              EXPECT_EQ(torch::zeros({1}, torch::TensorOptions(kFake)).device(), world.device());
            },
            {.transport = Transport::kShared, .device = kFake});
}

TEST_F(DeviceWorldTest, IsOnTheHostUnlessToldOtherwise) {
  EXPECT_EQ(alone({}).device(), c10::Device(c10::kCPU));
}

TEST_F(DeviceWorldTest, AWorldOfOneHasADeviceToo) {
  const World world = alone({.device = kFake});
  EXPECT_EQ(world.device(), fake_device(0));
  const auto tensor = torch::ones({3}, torch::TensorOptions(world.device()));
  world.communicator().all_reduce(tensor, ReduceOp::kMean, "a test").wait();
  world.communicator().all_reduce(torch::ones({3}), ReduceOp::kMean, "a test").wait();
  EXPECT_TRUE(tensor.cpu().eq(1).all().item<bool>());
  EXPECT_EQ(world.communicator().buffer(4, torch::kHalf).device(), world.device());
}

TEST_F(DeviceWorldTest, SaysOnceWhyTensorsPassThroughTheHost) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](World& world) { EXPECT_EQ(world.communicator().transport(), "shared, staged"); },
            {.device = kFake});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("zeropage: no NCCL between the ranks (rank 0: NCCL moves tensors of "
                              "CUDA devices, not of "));
  EXPECT_THAT(said, HasSubstr("); tensors pass through the host, which is slower"));
  EXPECT_EQ(said.find("no NCCL"), said.rfind("no NCCL"));
}

TEST_F(DeviceWorldTest, SaysNothingWhereTheHostWasAskedFor) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](World&) {}, {.transport = Transport::kGloo, .device = kFake});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("NCCL")));
}

TEST_F(DeviceWorldTest, RefusesNcclOnTheHost) {
  for (const auto& error : try_ranks(2, [](World&) {}, {.transport = Transport::kNccl})) {
    EXPECT_THAT(message_of(error), AllOf(HasSubstr("NCCL was asked for, but this world is on cpu"),
                                         HasSubstr("set WorldOptions::device to c10::kCUDA")));
  }
  EXPECT_THAT(error_of([] { alone({.transport = Transport::kNccl}); }),
              HasSubstr("NCCL was asked for, but this world is on cpu"));
}

TEST_F(DeviceWorldTest, RefusesNcclOnAnotherAcceleratorOnAllRanksAlike) {
  for (const auto& error :
       try_ranks(2, [](World&) {}, {.transport = Transport::kNccl, .device = kFake})) {
    EXPECT_THAT(message_of(error),
                AllOf(HasSubstr("NCCL was asked for, but cannot be had: rank 0: NCCL moves tensors "
                                "of CUDA devices, not of "),
                      HasSubstr("use auto or shared")));
  }
}

TEST_F(DeviceWorldTest, SaysWhyThereIsNoCudaOnAllRanksAlike) {
  // Read when CUDA is first asked; nothing else in this binary does.
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  const std::string why = memory::obstacle_to({c10::kCUDA, 0});
  EXPECT_THAT(why, HasSubstr("cuda:0: "));
  for (const auto& error : try_ranks(2, [](World&) {}, {.device = c10::kCUDA})) {
    EXPECT_THAT(message_of(error), HasSubstr(why));
  }
  EXPECT_EQ(error_of([] { alone({.device = c10::kCUDA}); }), why);
}

TEST_F(DeviceWorldTest, RefusesRanksOnDifferentKindsOfDevice) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> messages(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      messages[static_cast<size_t>(rank)] = error_of([&] {
        World({.rank = rank, .world_size = 2, .launcher = "test"}, store,
              {.device = rank == 0 ? c10::kCPU : kFake});
      });
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& message : messages) {
    EXPECT_THAT(message, HasSubstr("rank 0 has device: cpu; rank 1 has device: "));
  }
}

TEST_F(DeviceWorldTest, RefusesWhatIsNoDevice) {
  EXPECT_THAT(error_of([] { alone({.device = c10::kMeta}); }),
              HasSubstr("a world cannot be on meta"));
  EXPECT_THAT(memory::obstacle_to(fake_device(8)), HasSubstr("this process sees 8 such devices"));
  EXPECT_THAT(memory::obstacle_to({c10::DeviceType::XPU, 0}),
              HasSubstr("LibTorch has no such device in this process"));
}

}  // namespace
}  // namespace zeropage::comm::device_world_test
