// NCCL on real devices. How its communicator orders work is tested without one, over a backend of the
// tests' own: device_communicator_test.cpp.
#include "comm/devices/nccl_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/harness/contributions.h"
#include "tests/harness/ranks.h"
#include "zeropage/communicator.h"
#include "zeropage/device.h"

namespace zeropage::comm::nccl_communicator_test {
namespace {

using ::testing::AllOf;
using testing::contribution;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::tree_sum;
using testing::try_ranks;

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  void SetUp() override { need_devices(1); }

  static void need_devices(int count) {
    if (!has_nccl()) GTEST_SKIP() << "this build has no NCCL; build the preset cuda";
    const int devices = memory::device_count(c10::kCUDA);
    if (devices >= count) return;
    const std::string why = memory::obstacle_to({c10::kCUDA, 0});
    GTEST_SKIP() << "CUDA devices: needs " << count << ", there are " << devices
                 << (why.empty() ? why : " (" + why + ")");
  }
};

TEST_F(NcclCommunicatorTest, AWorldOfOneKeepsItsValues) {
  const c10::Device device(c10::kCUDA, 0);
  for (const auto order : {ReductionOrder::kFast, ReductionOrder::kFixed}) {
    const auto communicator = make_nccl_communicator(
        std::make_unique<SoloCommunicator>(), {.store = c10::make_intrusive<c10d::HashStore>(),
                                               .device = device,
                                               .order = order,
                                               .deadline = std::chrono::seconds(30)});
    for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
      const auto expected = contribution(0, 10'007, dtype);
      const auto tensor = expected.to(device);
      communicator->all_gather(tensor, "a test").wait();
      communicator->reduce_scatter(tensor, ReduceOp::kMean, "a test").wait();
      communicator->all_reduce(tensor, ReduceOp::kSum, "a test").wait();
      communicator->broadcast(tensor, 0, "a test").wait();
      communicator->barrier("a test").wait();
      EXPECT_TRUE(torch::equal(tensor.cpu(), expected)) << dtype;
    }
    EXPECT_EQ(communicator->transport(), "nccl");
  }
}

TEST_F(NcclCommunicatorTest, RefusesTwoRanksOnOneDeviceAndNamesThem) {
  const int devices = memory::device_count(c10::kCUDA);
  const auto errors =
      try_ranks(devices + 1, [](World&) {}, {.transport = Transport::kNccl, .device = c10::kCUDA});
  for (const auto& error : errors) {
    EXPECT_THAT(
        message_of(error),
        AllOf(HasSubstr("NCCL was asked for, but cannot be had: ranks 0 and "),
              HasSubstr(c10::str(" share the device ", memory::device_name({c10::kCUDA, 0}))),
              HasSubstr("use auto or shared")));
  }
}

TEST_F(NcclCommunicatorTest, RanksThatShareADevicePassThroughTheHost) {
  const int ranks = memory::device_count(c10::kCUDA) + 1;
  run_ranks(ranks,
            [&](World& world) {
              EXPECT_EQ(world.communicator().transport(), "shared, staged");
              const auto tensor = contribution(world.rank(), 100'003).to(world.device());
              world.communicator().all_reduce(tensor, ReduceOp::kSum, "a test").wait();
              EXPECT_TRUE(torch::equal(tensor.cpu(), tree_sum(0, ranks, 100'003)));
            },
            {.device = c10::kCUDA});
}

class NcclRanksTest : public NcclCommunicatorTest {
 protected:
  void SetUp() override { need_devices(2); }
};

TEST_F(NcclRanksTest, CollectivesGiveTheHostsResults) {
  const int ranks = std::min(memory::device_count(c10::kCUDA), 4);
  run_ranks(ranks,
            [&](World& world) {
              Communicator& communicator = world.communicator();
              EXPECT_EQ(communicator.transport(), "nccl");
              for (const int64_t slice : {1, 257, 300'001}) {
                const int64_t numel = slice * ranks;
                const auto sum = tree_sum(0, ranks, numel);
                const auto whole = contribution(world.rank(), numel).to(world.device());
                communicator.reduce_scatter(whole, ReduceOp::kMean, "a test").wait();
                EXPECT_TRUE(torch::allclose(whole.narrow(0, world.rank() * slice, slice).cpu(),
                                            (sum / ranks).narrow(0, world.rank() * slice, slice),
                                            1e-5, 1e-6));
                communicator.all_gather(whole, "a test").wait();
                EXPECT_TRUE(torch::allclose(whole.cpu(), sum / ranks, 1e-5, 1e-6));
                const auto tensor = contribution(world.rank(), numel).to(world.device());
                communicator.broadcast(tensor, ranks - 1, "a test").wait();
                EXPECT_TRUE(torch::equal(tensor.cpu(), contribution(ranks - 1, numel)));
                if (world.rank() == 0) communicator.send(whole, 1, "a test").wait();
                if (world.rank() == 1) {
                  const auto received = torch::empty_like(whole);
                  communicator.recv(received, 0, "a test").wait();
                  EXPECT_TRUE(torch::equal(received, whole));
                }
              }
            },
            {.device = c10::kCUDA});
}

TEST_F(NcclRanksTest, TheFixedOrderGivesTheHostsBits) {
  const int ranks = std::min(memory::device_count(c10::kCUDA), 4);
  run_ranks(ranks,
            [&](World& world) {
              for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
                for (const int64_t numel : {1, 1000, 300'001}) {
                  const auto tensor = contribution(world.rank(), numel, dtype).to(world.device());
                  world.communicator().all_reduce(tensor, ReduceOp::kMean, "a test").wait();
                  EXPECT_TRUE(torch::equal(tensor.cpu(),
                                           (tree_sum(0, ranks, numel, dtype) / ranks).to(dtype)))
                      << dtype << numel;
                }
              }
            },
            {.device = c10::kCUDA, .reduction_order = ReductionOrder::kFixed});
}

}  // namespace
}  // namespace zeropage::comm::nccl_communicator_test
