// What a simulated rank allocates, as a record that an allocator is asked about.
#include "planning/allocation_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device/stream.h"
#include "memory/meta_memory.h"
#include "zeropage/bytes.h"
#include "zeropage/distributed_data_parallel.h"

namespace zeropage::allocation_record_test {
namespace {

using namespace memory;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using zeropage::planning::AllocationChange;
using zeropage::planning::AllocationRecord;
using zeropage::planning::hold_what_stays;
using zeropage::planning::Reserving;

class AllocationRecordTest : public ::testing::Test {
 protected:
  AllocationRecordTest() {
    observe_meta_memory();
    ledger_->sink().exchange(record_);
  }
  ~AllocationRecordTest() override { ledger_->sink().exchange(nullptr); }

  static at::Tensor allocate(int64_t bytes) {
    return at::empty({bytes}, at::device(c10::kMeta).dtype(at::kByte));
  }

  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  const LedgerScope scope_{ledger_};
  const std::shared_ptr<AllocationRecord> record_ = std::make_shared<AllocationRecord>();
};

TEST_F(AllocationRecordTest, HasBlocksInTheirOrderWithTheirStreams) {
  const at::Tensor stays = allocate(3_MiB);
  {
    const device::StreamScope on_another(device::Stream::another(c10::kMeta));
    at::Tensor goes = allocate(5_MiB);
    assign(goes, Kind::kBucket);
  }
  const std::vector<AllocationChange> changes = record_->take();
  ASSERT_THAT(changes, SizeIs(3));
  EXPECT_EQ(changes[0].bytes, 3_MiB);
  EXPECT_EQ(changes[0].stream, 0);
  EXPECT_EQ(changes[1].bytes, 5_MiB);
  EXPECT_GT(changes[1].stream, 0);
  EXPECT_EQ(changes[2].bytes, 0);
  EXPECT_EQ(changes[2].block, changes[1].block);
  EXPECT_THAT(record_->take(), IsEmpty());
}

// It has no memory in a run, and the host's tensors are on no device.
TEST_F(AllocationRecordTest, LeavesOutADeferredConstructionAndTheHost) {
  const DeferredModule<torch::nn::Linear> deferred([] { return torch::nn::Linear(64, 64); });
  const at::Tensor on_host = torch::empty({1_MiB});
  EXPECT_THAT(record_->take(), IsEmpty());
}

TEST_F(AllocationRecordTest, ToldTwiceReservesNoMoreThanStepsDo) {
  std::vector<at::Tensor> kept;
  kept.push_back(allocate(30_MiB));
  const std::vector<AllocationChange> before = record_->take();
  allocate(50_MiB);
  kept.push_back(allocate(4_MiB));
  const std::vector<AllocationChange> step = record_->take();
  Reserving reserving({.expandable_segments = false});
  reserving.apply(before);
  EXPECT_EQ(reserving.so_far().peak_bytes, 30_MiB);
  reserving.apply(step);
  EXPECT_EQ(reserving.so_far().peak_bytes, 80_MiB) << "what is kept lies where the 50 MiB were";
  for (int times = 0; times < 3; ++times) {
    reserving.apply(step);
    EXPECT_EQ(reserving.so_far().peak_bytes, 130_MiB);
  }
  EXPECT_TRUE(reserving.so_far().fits());
}

TEST_F(AllocationRecordTest, SaysWhatDidNotFit) {
  const at::Tensor first = allocate(30_MiB);
  const at::Tensor second = allocate(5_MiB);
  const at::Tensor third = allocate(40_MiB);
  Reserving reserving({.expandable_segments = false, .limit_bytes = 80_MiB});
  reserving.apply(record_->take());
  EXPECT_FALSE(reserving.so_far().fits());
  EXPECT_EQ(reserving.so_far().refused_bytes, 40_MiB);
  EXPECT_EQ(reserving.so_far().reserved_then_bytes, 50_MiB);
  EXPECT_EQ(reserving.so_far().used_then_bytes, 35_MiB);
}

TEST_F(AllocationRecordTest, HoldsWhatStays) {
  at::Tensor first = allocate(1_MiB);
  const at::Tensor second = allocate(2_MiB);
  std::vector<AllocationChange> held = record_->take();
  first.reset();
  allocate(3_MiB);
  const at::Tensor third = allocate(4_MiB);
  hold_what_stays(held, record_->take());
  ASSERT_THAT(held, SizeIs(2));
  EXPECT_EQ(held[0].bytes, 2_MiB);
  EXPECT_EQ(held[1].bytes, 4_MiB);
}

}  // namespace
}  // namespace zeropage::allocation_record_test
