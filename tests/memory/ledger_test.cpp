#include "zeropage/ledger.h"

#include <thread>

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "memory/charged_block.h"
#include "memory/meta_memory.h"
#include "memory/storage.h"
#include "zeropage/check.h"
#include "zeropage/testing.h"

namespace zeropage::memory::ledger_test {
namespace {

class LedgerTest : public ::testing::Test {
 protected:
  at::Tensor allocate(int64_t bytes) { return at::empty({bytes}, at::kByte); }

  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>("rank 1/2");
  LedgerScope scope_{ledger_};
};

TEST_F(LedgerTest, ChargesEveryTensorUntilItIsFreed) {
  auto tensor = allocate(1000);
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kActivationAndOther, 1000);
  tensor.reset();
  EXPECT_EQ(ledger_->now().total(), 0);
}

TEST_F(LedgerTest, ChargesTheInnermostKind) {
  const KindScope outer(Kind::kGradient);
  const auto gradient = allocate(10);
  at::Tensor staging;
  {
    const KindScope inner(Kind::kStaging);
    staging = allocate(20);
  }
  const auto more = allocate(5);
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kGradient, 15);
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kStaging, 20);
}

TEST_F(LedgerTest, KeepsTheBreakdownOfThePeak) {
  const KindScope kind(Kind::kParameter);
  const auto parameter = allocate(100);
  {
    const KindScope bucket(Kind::kBucket);
    allocate(50);
  }
  const auto later = allocate(30);
  EXPECT_EQ(ledger_->at_peak().total(), 150);
  EXPECT_EQ(ledger_->at_peak()[Kind::kBucket], 50);
  EXPECT_EQ(ledger_->at_peak()[Kind::kParameter], 100);
  EXPECT_PEAK_BYTES_LE(*ledger_, 150);
  ledger_->reset_peak();
  EXPECT_EQ(ledger_->at_peak().total(), 130);
}

TEST_F(LedgerTest, AddsUpToWhatTheAllocatorHandedOut) {
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  const auto small = allocate(3);
  const auto large = allocate(3_MiB + 1);
  const auto sum = torch::randn({1000}) + torch::ones({1000});
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  EXPECT_GE(ledger_->now().total(), 3_MiB + 4 + 4000);
}

TEST_F(LedgerTest, DischargesTheLedgerThatWasCharged) {
  auto tensor = allocate(64);
  std::thread([&] {
    const LedgerScope other(std::make_shared<Ledger>("rank 0/2"));
    tensor.reset();
    EXPECT_EQ(Ledger::current()->now().total(), 0);
  }).join();
  EXPECT_EQ(ledger_->now().total(), 0);
}

TEST_F(LedgerTest, GivesThreadsWithoutAScopeTheProcessLedger) {
  std::thread([] { EXPECT_EQ(Ledger::current(), Ledger::process()); }).join();
  EXPECT_EQ(Ledger::current(), ledger_);
}

TEST_F(LedgerTest, OutlivesItsOwnersForTheSakeOfItsBlocks) {
  at::Tensor tensor;
  {
    const LedgerScope scope(std::make_shared<Ledger>("short"));
    tensor = allocate(77);
  }
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  tensor.reset();
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
}

TEST_F(LedgerTest, RenamesATensorsBytesAndTakesThemOver) {
  at::Tensor tensor;
  std::thread([&] { tensor = allocate(40); }).join();
  const int64_t before = Ledger::process()->now().total();
  EXPECT_TRUE(assign(tensor, Kind::kParameter));
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kParameter, 40);
  EXPECT_EQ(Ledger::process()->now().total(), before - 40);
}

TEST_F(LedgerTest, LeavesMemoryOfOthersAlone) {
  float value = 0;
  EXPECT_FALSE(assign(torch::from_blob(&value, {1}), Kind::kParameter));
  EXPECT_EQ(ledger_->now()[Kind::kParameter], 0);
}

TEST_F(LedgerTest, CountsBytesChargedByHand) {
  ledger_->charge(Kind::kStaging, 4096);
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kStaging, 4096);
  ledger_->discharge(Kind::kStaging, 4096);
  EXPECT_EQ(ledger_->now().total(), 0);
}

TEST_F(LedgerTest, ExpectationsFailWithTheBreakdown) {
  const KindScope kind(Kind::kGradient);
  const auto held = allocate(2048);
  const auto& ledger = *ledger_;
  EXPECT_PEAK_BYTES_LE(ledger, 2048);
  EXPECT_NONFATAL_FAILURE(EXPECT_PEAK_BYTES_LE(*Ledger::current(), 2047),
                          "expected at most 2047 bytes, got 2048; at the peak: gradient 2.0 KiB");
  EXPECT_NONFATAL_FAILURE(EXPECT_KIND_BYTES_EQ(*Ledger::current(), Kind::kGradient, 2047),
                          "expected 2047 bytes of gradient, got 2048; the ledger holds gradient");
}

TEST_F(LedgerTest, ExpectationsFailForALedgerThatNobodyCharges) {
  static const Ledger idle;
  const auto held = allocate(2048);
  EXPECT_NONFATAL_FAILURE(EXPECT_PEAK_BYTES_LE(idle, 1_KiB), "nobody charges this ledger");
  EXPECT_NONFATAL_FAILURE(EXPECT_KIND_BYTES_EQ(idle, Kind::kGradient, 0), "Ledger::current()");
  // One that is charged may have nothing to show.
  const LedgerScope scope(std::make_shared<Ledger>());
  EXPECT_PEAK_BYTES_LE(*Ledger::current(), 0);
}

TEST_F(LedgerTest, BytesThatWereChargedByHandAreNoneOfTheAllocators) {
  const auto tensor = allocate(100);
  const int64_t before = host_bytes_charged_by_hand();
  ledger_->charge(Kind::kStaging, 4096);
  ledger_->charge(Kind::kStaging, 4096, c10::DeviceType::CUDA);
  EXPECT_EQ(host_bytes_charged_by_hand(), before + 4096);
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  EXPECT_TRUE(assign(tensor, Kind::kParameter));
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  ledger_->discharge(Kind::kStaging, 4096);
  ledger_->discharge(Kind::kStaging, 4096, c10::DeviceType::CUDA);
  EXPECT_EQ(host_bytes_charged_by_hand(), before);
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  // A ledger that is off by a byte is found.
  {
    const HostAllocatorScope as_allocator;
    ledger_->charge(Kind::kStaging, 1);
  }
  EXPECT_NONFATAL_FAILURE(EXPECT_LEDGERS_EQUAL_ALLOCATOR(), "were charged by hand");
  const HostAllocatorScope as_allocator;
  ledger_->discharge(Kind::kStaging, 1);
}

TEST_F(LedgerTest, TellsSurvivorsFromTemporaries) {
  at::Tensor state;
  {
    const SurvivorScope scope(Kind::kOptimizerState);
    const auto temporary = allocate(512);
    state = allocate(256);
    EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kStaging, 768);
  }
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kOptimizerState, 256);
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kStaging, 0);
  state.reset();
  EXPECT_EQ(ledger_->now().total(), 0);
}

TEST_F(LedgerTest, LetsAnotherThreadFreeATemporary) {
  at::Tensor tensor;
  {
    const SurvivorScope scope(Kind::kOptimizerState);
    tensor = allocate(512);
    std::thread([&] { tensor.reset(); }).join();
  }
  EXPECT_EQ(ledger_->now().total(), 0);
}

TEST_F(LedgerTest, HandsOutNothingForNoBytes) {
  const auto empty = torch::empty({0});
  EXPECT_EQ(ledger_->now().total(), 0);
}

TEST_F(LedgerTest, NamesTheOwnerInErrors) {
  try {
    ZP_CHECK(1 == 2, "page \"blocks.0\": expected 1, got 2");
    FAIL() << "the check passed";
  } catch (const std::exception& error) {
    EXPECT_EQ(message_of(error), "[rank 1/2] page \"blocks.0\": expected 1, got 2");
  }
}

TEST(MemoryTableTest, ShowsKindsRanksAndTheFormula) {
  Breakdown held;
  held[Kind::kParameter] = 2_MiB;
  held[Kind::kActivationAndOther] = 1_MiB;
  Breakdown formula;
  formula[Kind::kParameter] = 2_MiB;
  const std::vector<MemoryColumn> columns = {{"rank 0", held, held.persistent()}};
  const std::string text =
      memory_table(columns, MemoryColumn{"formula", formula, formula.persistent()});
  EXPECT_EQ(text,
            "                              rank 0     formula\n"
            "parameter                    2.0 MiB     2.0 MiB\n"
            "activation_and_other         1.0 MiB           -\n"
            "persistent                   2.0 MiB     2.0 MiB\n"
            "total                        3.0 MiB           -\n");
}

TEST(MemoryTableTest, ClosesWithRowsThatTheLedgerDoesNotKnow) {
  Breakdown held;
  held[Kind::kParameter] = 2_MiB;
  const std::vector<MemoryColumn> columns = {{"rank 0", held, held.persistent()},
                                             {"rank 1", {}, 0}};
  const std::vector<MemoryRow> rows = {{"resident", {3_MiB, 4_MiB}}};
  EXPECT_EQ(memory_table(columns, std::nullopt, rows),
            "                              rank 0      rank 1\n"
            "parameter                    2.0 MiB         0 B\n"
            "persistent                   2.0 MiB         0 B\n"
            "total                        2.0 MiB         0 B\n"
            "resident                     3.0 MiB     4.0 MiB\n");
}

class MetaMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override { observe_meta_memory(); }

  Breakdown on_meta() const { return ledger_->now(c10::kMeta); }
  static at::Tensor kilobyte() { return at::empty({256}, at::dtype(at::kFloat).device(at::kMeta)); }

  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>("rank 0/4");
  const LedgerScope scope_{ledger_};
};

TEST_F(MetaMemoryTest, ChargesTensorsWithoutMemoryUnderTheirKindWhileTheyLive) {
  {
    const KindScope kind(Kind::kGradient);
    const at::Tensor tensor = kilobyte();
    const at::Tensor view = tensor.narrow(0, 0, 8);
    EXPECT_EQ(on_meta()[Kind::kGradient], 1_KiB);
    EXPECT_EQ(ledger_->now(c10::kCPU).total(), 0);
    EXPECT_EQ(tensor.const_data_ptr(), nullptr);
  }
  EXPECT_EQ(on_meta().total(), 0);
  EXPECT_EQ(ledger_->at_peak(c10::kMeta)[Kind::kGradient], 1_KiB);
}

TEST_F(MetaMemoryTest, SeesWhatOperatorsMakeAndWhatIsRenamed) {
  const at::Tensor sum = kilobyte() + kilobyte();
  EXPECT_EQ(on_meta()[Kind::kActivationAndOther], 1_KiB);
  EXPECT_EQ(ledger_->at_peak(c10::kMeta).total(), 3_KiB);
  EXPECT_TRUE(assign(sum, Kind::kStaging));
  EXPECT_EQ(on_meta()[Kind::kStaging], 1_KiB);
  at::Tensor state;
  {
    const SurvivorScope survivors(Kind::kOptimizerState);
    state = kilobyte().add(1);
  }
  EXPECT_EQ(on_meta()[Kind::kOptimizerState], 1_KiB);
}

TEST_F(MetaMemoryTest, KeepsAPageAsLongAsAStorageLivesInIt) {
  at::Tensor parameter = kilobyte();
  {
    const KindScope kind(Kind::kParameter);
    move_storage_into(parameter, at::empty({512}, parameter.options()), /*offset=*/256);
  }
  EXPECT_EQ(on_meta()[Kind::kParameter], 2_KiB);
  EXPECT_EQ(on_meta().total(), 2_KiB);
  drop_memory(*parameter.storage().unsafeGetStorageImpl());
  EXPECT_EQ(on_meta().total(), 0);
}

TEST_F(MetaMemoryTest, ChargesWhatStandsForATierThere) {
  {
    const at::Tensor away = meta_tensor_in(Tier::kNvme, 256, at::kFloat, Kind::kOptimizerState);
    EXPECT_EQ(away.sizes(), at::IntArrayRef({256}));
    EXPECT_EQ(ledger_->offloaded(Tier::kNvme)[Kind::kOptimizerState], 1_KiB);
    EXPECT_EQ(on_meta().total(), 0);
  }
  EXPECT_EQ(ledger_->offloaded(Tier::kNvme).total(), 0);
}

}  // namespace
}  // namespace zeropage::memory::ledger_test
