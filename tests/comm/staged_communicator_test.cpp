// What only a staged communicator does; what all do on a device: device_communicator_test.cpp.
#include "comm/devices/staged_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/ranks.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::staged_communicator_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RankOptions;
using testing::run_ranks;
using testing::try_ranks;

RankOptions staged(Transport transport) {
  testing::register_fake_accelerator();
  RankOptions options;
  options.device = c10::DeviceType::PrivateUse1;
  options.transport = transport;
  return options;
}

int64_t staging_bytes() {
  return memory::Ledger::current()->now()[memory::Kind::kStaging];
}

TEST(StagedCommunicatorTest, SaysWhatCarriesTheBytes) {
  run_ranks(
      2, [](World& world) { EXPECT_EQ(world.communicator().transport(), "gloo, staged"); },
      staged(Transport::kGloo));
  run_ranks(
      2, [](World& world) { EXPECT_EQ(world.communicator().transport(), "shared, staged"); },
      staged(Transport::kShared));
}

TEST(StagedCommunicatorTest, HoldsOneBufferAsLargeAsTheLargestOperation) {
  run_ranks(
      2,
      [](World& world) {
        const int64_t before = staging_bytes();
        const auto options = torch::TensorOptions(world.device());
        for (const int64_t numel : {1000, 70'000, 500}) {
          const auto tensor = torch::zeros({numel}, options);
          world.communicator().broadcast(tensor, 0, "a test").wait();
        }
        EXPECT_EQ(staging_bytes() - before, 4 * 70'000);
      },
      staged(Transport::kShared));
}

TEST(StagedCommunicatorTest, WaitsForNoWholeDevice) {
  run_ranks(
      1, [](World&) {}, staged(Transport::kAuto));
  testing::reset_fake_counters();
  run_ranks(
      2,
      [](World& world) {
        const auto tensor = torch::ones({1000}, torch::TensorOptions(world.device()));
        world.communicator().all_reduce(tensor, ReduceOp::kSum, "a test").wait();
      },
      staged(Transport::kShared));
  EXPECT_EQ(testing::fake_counters().device_syncs, 0);
  EXPECT_EQ(testing::fake_counters().record_stream, 0);
}

TEST(StagedCommunicatorTest, NamesTheOperationAndTheRankThatIsLost) {
  for (const Transport transport : {Transport::kGloo, Transport::kShared}) {
    const auto errors = try_ranks(
        2,
        [](World& world) {
          const auto tensor = torch::ones({100'000}, torch::TensorOptions(world.device()));
          Communicator& communicator = world.communicator();
          communicator.all_reduce(tensor, ReduceOp::kSum, "page \"a\"").wait();
          if (world.rank() == 1) throw std::runtime_error("rank 1 has had enough");
          const std::string error = error_of(
              [&] { communicator.all_reduce(tensor, ReduceOp::kSum, "page \"b\"").wait(); });
          EXPECT_THAT(error, AllOf(HasSubstr("[rank 0/2] all_reduce #1 of page \"b\" (390.6 KiB)"),
                                   HasSubstr("lost rank 1")));
          EXPECT_EQ(error_of([&] { communicator.broadcast(tensor, 0, "page \"c\"").wait(); }),
                    error);
        },
        staged(transport));
    EXPECT_THAT(message_of(errors[1]), HasSubstr("had enough"));
  }
}

TEST(StagedCommunicatorTest, EndsAtOnceWhenItIsDestroyedWithOperationsInFlight) {
  const auto begun = std::chrono::steady_clock::now();
  try_ranks(
      2,
      [](World& world) {
        if (world.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::seconds(1));
          throw std::runtime_error("rank 1 comes never");
        }
        const auto tensor = torch::ones({1000}, torch::TensorOptions(world.device()));
        const Pending first = world.communicator().all_reduce(tensor, ReduceOp::kSum, "page \"a\"");
        const Pending second = world.communicator().broadcast(tensor, 0, "page \"b\"");
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        throw std::runtime_error("rank 0 neither");
      },
      staged(Transport::kShared));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
}

}  // namespace
}  // namespace zeropage::comm::staged_communicator_test
