// Blocks of an accelerator on the ledgers, by the fake one.
#include "memory/device_memory.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "memory/charged_block.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "zeropage/bytes.h"
#include "zeropage/ledger.h"
#include "zeropage/testing.h"

namespace zeropage::memory::device_memory_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

class DeviceMemoryTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    register_fake_accelerator();
    set_fake_memory_observer([](bool allocated, void* data, size_t bytes, int) {
      if (allocated) {
        note_device_block(data, static_cast<int64_t>(bytes), kDevice);
      } else {
        forget_device_block(data);
      }
    });
  }
  static void TearDownTestSuite() { set_fake_memory_observer({}); }

  at::Tensor allocate(int64_t bytes) {
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(fake_device()));
  }
  int64_t held(Kind kind) const { return ledger_->now(kDevice)[kind]; }

  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>("rank 1/2");
  LedgerScope scope_{ledger_};
};

TEST_F(DeviceMemoryTest, IsChargedApartFromTheHosts) {
  const KindScope kind(Kind::kParameter);
  auto tensor = allocate(1024);
  EXPECT_EQ(held(Kind::kParameter), 1024);
  EXPECT_EQ(ledger_->now()[Kind::kParameter], 0);
  tensor.reset();
  EXPECT_EQ(held(Kind::kParameter), 0);
  EXPECT_EQ(ledger_->at_peak(kDevice)[Kind::kParameter], 1024);
}

TEST_F(DeviceMemoryTest, AddsUpToWhatTheAllocatorHandedOut) {
  const int64_t before = device_allocated_bytes(kDevice);
  const auto first = allocate(512);
  const auto second = allocate(1_MiB);
  EXPECT_EQ(device_allocated_bytes(kDevice) - before, 1_MiB + 512);
  EXPECT_EQ(ledger_->now(kDevice).total(), 1_MiB + 512);
}

TEST_F(DeviceMemoryTest, TellsSurvivorsFromTemporaries) {
  at::Tensor state;
  {
    const SurvivorScope scope(Kind::kOptimizerState);
    const auto temporary = allocate(512);
    state = allocate(1024);
    EXPECT_EQ(held(Kind::kStaging), 1536);
  }
  EXPECT_EQ(held(Kind::kOptimizerState), 1024);
  EXPECT_EQ(held(Kind::kStaging), 0);
}

TEST_F(DeviceMemoryTest, RenamesATensorsBytesAndTakesThemOver) {
  at::Tensor tensor;
  std::thread([&] { tensor = allocate(512); }).join();
  EXPECT_TRUE(assign(tensor, Kind::kGradient));
  EXPECT_EQ(held(Kind::kGradient), 512);
}

TEST_F(DeviceMemoryTest, ReportsWhatIsHeldWhenMemoryRunsOut) {
  const KindScope kind(Kind::kOptimizerState);
  auto tensor = allocate(2_MiB);
  const std::string report = out_of_memory_report({.device = kDevice,
                                                   .asked_bytes = 3_MiB,
                                                   .free_bytes = 1_MiB,
                                                   .cached_bytes = 2_MiB,
                                                   .advice = "ask elsewhere"});
  EXPECT_THAT(report, HasSubstr("[rank 1/2] out of "));
  EXPECT_THAT(report, HasSubstr("3.0 MiB of optimizer_state asked for, 1.0 MiB free on the device, "
                                "2.0 MiB unused in pieces of the cache\n"));
  EXPECT_THAT(report, ::testing::EndsWith("\nask elsewhere\n"));
  EXPECT_THAT(report, HasSubstr("optimizer_state              2.0 MiB     2.0 MiB\n"));
}

}  // namespace
}  // namespace zeropage::memory::device_memory_test
