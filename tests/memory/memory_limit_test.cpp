#include "memory/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "memory/charged_block.h"
#include "tests/harness/errors.h"
#include "zeropage/bytes.h"
#include "zeropage/testing.h"

namespace zeropage::memory::memory_limit_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

class MemoryLimitTest : public ::testing::Test {
 protected:
  static at::Tensor allocate(int64_t bytes) { return at::empty({bytes}, at::kByte); }

  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>("rank 1/2");
  LedgerScope scope_{ledger_};
};

TEST_F(MemoryLimitTest, RefusesTheAllocationThatPassesItAndChargesNothing) {
  const MemoryLimitScope limit(ledger_, {.device_bytes = 1_MiB});
  const KindScope kind(Kind::kOptimizerState);
  const at::Tensor held = allocate(600_KiB);
  const std::string error = error_of([] { allocate(600_KiB); });
  EXPECT_THAT(error,
              HasSubstr("[rank 1/2] 600.0 KiB of optimizer_state would pass the limit of device "
                        "memory: 600.0 KiB of 1.0 MiB a rank are held "
                        "(options.device_memory_bytes), so 176.0 KiB are missing\n"));
  EXPECT_THAT(error, HasSubstr("optimizer_state            600.0 KiB"));
  EXPECT_THAT(error, HasSubstr("most is held by: optimizer_state 600.0 KiB"));
  EXPECT_EQ(ledger_->now().total(), 600_KiB);
  EXPECT_LEDGERS_EQUAL_ALLOCATOR();
  // What fits to the byte is taken.
  const at::Tensor rest = allocate(1_MiB - 600_KiB);
  EXPECT_EQ(ledger_->now().total(), 1_MiB);
  EXPECT_THROW(allocate(1), c10::OutOfMemoryError);
}

TEST_F(MemoryLimitTest, CountsTensorsAndWhatIsOffloadedAgainstTheHosts) {
  const MemoryLimitScope limit(ledger_, {.host_bytes = 1000});
  ledger_->charge_offloaded(Tier::kHost, Kind::kGradient, 400);
  const at::Tensor tensor = allocate(500);
  EXPECT_THAT(error_of([] { allocate(200); }),
              HasSubstr("the limit of host memory: 900 B of 1000 B"));
  const auto offload = [&] { ledger_->charge_offloaded(Tier::kHost, Kind::kGradient, 200); };
  EXPECT_THAT(error_of(offload), HasSubstr("200 B of gradient would pass"));
  EXPECT_THAT(error_of(offload),
              HasSubstr("most is held by: activation_and_other 500 B, gradient 400 B\n"));
  ledger_->charge_offloaded(Tier::kNvme, Kind::kGradient, 2000);  // is not on the host
  ledger_->charge(Kind::kBucket, 2000, c10::DeviceType::Meta);    // nor is this
  EXPECT_EQ(ledger_->offloaded(Tier::kHost).total(), 400);
  ledger_->discharge_offloaded(Tier::kHost, Kind::kGradient, 400);
  allocate(200);
}

TEST_F(MemoryLimitTest, HoldsTheLowestOfSeveralUntilItEnds) {
  const MemoryLimitScope high(ledger_, {.device_bytes = 1000});
  auto low = std::make_unique<MemoryLimitScope>(ledger_, MemoryLimits{.device_bytes = 100});
  EXPECT_THAT(error_of([] { allocate(200); }), HasSubstr("of 100 B a rank"));
  low.reset();
  allocate(200);
  EXPECT_THAT(error_of([] { allocate(2000); }), HasSubstr("of 1000 B a rank"));
}

TEST_F(MemoryLimitTest, AddsWhatIsAdvisedByThoseWhoLive) {
  const auto advise = [](const MemoryShortage& shortage) {
    return "free " + std::to_string(shortage.request.missing_bytes) + " of " +
           std::to_string(shortage.on_device.total()) + "\n";
  };
  const MemoryLimitScope limit(ledger_, {.device_bytes = 100});
  EXPECT_THAT(error_of([] { allocate(101); }), HasSubstr("use more ranks"));
  const MemoryLimitScope advice(ledger_, {}, advise);
  const at::Tensor held = allocate(10);
  EXPECT_THAT(error_of([] { allocate(101); }), HasSubstr("free 11 of 10\n"));
}

// A block that was refused must not be renamed when the scope ends.
TEST_F(MemoryLimitTest, LeavesScopesOfSurvivorsWithoutTheRefusedBlock) {
  const MemoryLimitScope limit(ledger_, {.device_bytes = 100});
  at::Tensor state;
  {
    const SurvivorScope survivors(Kind::kOptimizerState);
    state = allocate(60);
    EXPECT_THROW(allocate(60), c10::OutOfMemoryError);
  }
  EXPECT_KIND_BYTES_EQ(*ledger_, Kind::kOptimizerState, 60);
  EXPECT_EQ(ledger_->now().total(), 60);
}

TEST_F(MemoryLimitTest, NamesTheNodeOfBackwardThatAllocates) {
  const at::Tensor x = at::ones({1000}).set_requires_grad(true);
  const at::Tensor loss = x.exp().sum();
  const MemoryLimitScope limit(ledger_, {.device_bytes = ledger_->now().total() + 2000});
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr(" in backward (ExpBackward0) would pass"));
}

TEST_F(MemoryLimitTest, NamesTheOwnerAndThePage) {
  const MemoryLimitScope limit(ledger_, {.device_bytes = 100});
  const OwnerScope owner("gradient bucket", "blocks.3");
  const KindScope kind(Kind::kBucket);
  EXPECT_THAT(error_of([] { allocate(101); }),
              HasSubstr("101 B of bucket for the gradient bucket, page \"blocks.3\", would pass"));
}

TEST_F(MemoryLimitTest, TellsTheLastChangesOfWhoTookAndWhoFreed) {
  const MemoryLimitScope limit(ledger_, {.device_bytes = 1_MiB});
  std::vector<at::Tensor> held;
  for (int number = 0; number < 20; ++number) {
    const OwnerScope owner("gradient bucket", number < 18 ? "an old page" : "blocks.3");
    const KindScope kind(number % 2 == 0 ? Kind::kBucket : Kind::kGradient);
    held.push_back(allocate(1_KiB));
  }
  {
    const KindScope kind(Kind::kActivation);
    for (int number = 0; number < 3; ++number) held.push_back(allocate(2_KiB));
    held.pop_back();
  }
  const std::string error = error_of([] { allocate(2_MiB); });
  EXPECT_THAT(error, HasSubstr("the last changes, the newest at the end:\n"));
  EXPECT_THAT(error,
              HasSubstr("  bucket (host): 1.0 KiB taken in 1, for the gradient bucket, page "
                        "\"blocks.3\"\n"
                        "  gradient (host): 1.0 KiB taken in 1, for the gradient bucket, page "
                        "\"blocks.3\"\n"
                        "  activation (host): 6.0 KiB taken in 3, 2.0 KiB freed in 1\n"));
  // Eight lines, of which five are of the pages before.
  size_t old = 0;
  for (size_t at = error.find("an old page"); at != std::string::npos;
       at = error.find("an old page", at + 1)) {
    ++old;
  }
  EXPECT_EQ(old, 5U);
}

TEST_F(MemoryLimitTest, CutsTheNameOfALongPageOff) {
  const MemoryLimitScope limit(ledger_, {.device_bytes = 1000});
  const std::string page(200, 'p');
  {
    const OwnerScope owner("page", page);
    allocate(100);
    allocate(100);
  }
  EXPECT_THAT(error_of([] { allocate(2000); }),
              HasSubstr("200 B taken in 2, 200 B freed in 2, for the page, page \"" +
                        std::string(47, 'p') + "\"\n"));
}

TEST_F(MemoryLimitTest, SaysWhoHoldsWhatWhereTheSystemHasNoMore) {
  const KindScope kind(Kind::kActivation);
  const std::string error = error_of([] { allocate(int64_t{1} << 60); });
  EXPECT_THAT(error, HasSubstr("[rank 1/2] out of host memory: "));
  EXPECT_THAT(error, HasSubstr(" of activation in forward asked for, "));
  EXPECT_THAT(error, HasSubstr("persistent "));
}

}  // namespace
}  // namespace zeropage::memory::memory_limit_test
