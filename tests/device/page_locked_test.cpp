// Page-locked memory under copies that are late, on the fake accelerator, whose cache of such memory gives a freed block out again at once.
#include "device/page_locked.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/devices/staging_buffer.h"
#include "device/pinned_arena.h"
#include "memory/storage.h"
#include "offload/copy_engine.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"

namespace zeropage::device::page_locked_test {
namespace {

using namespace zeropage::testing;
using at::Tensor;

constexpr int64_t kNumel = 1024;

class PageLockedTest : public ::testing::Test {
 protected:
  PageLockedTest() {
    register_fake_accelerator();
    finish_fake_work();
  }
  ~PageLockedTest() override { finish_fake_work(); }

  static c10::Stream compute() { return c10::Stream(c10::Stream::DEFAULT, fake_device()); }

  // What others put into page-locked memory that they can get, of any size up to a few times kNumel.
  static std::vector<Tensor> taken_by_others() {
    std::vector<Tensor> taken;
    for (const int64_t numel : {kNumel, 2 * kNumel, 4 * kNumel}) {
      for (int i = 0; i < 4; ++i) {
        taken.push_back(torch::full({numel}, 9.0F, torch::TensorOptions().pinned_memory(true)));
      }
    }
    return taken;
  }

  // The values that a copy to the device brings when what it reads is let go before its stream comes to it, and others take all
  // the memory that they can get.
  // copy(to, engine): starts it.
  template <typename Copy>
  static Tensor copied_late(const Copy& copy) {
    const auto engine = offload::CopyEngine::make(fake_device());
    const Tensor to = torch::zeros({kNumel}, fake_device());
    {
      // The engine's streams begin after what compute has been given.
      const HeldStream held(compute());
      copy(to, *engine);
      taken_by_others();
    }
    engine->wait_for_device();
    return to.cpu();
  }
};

TEST_F(PageLockedTest, AnArenaThatEndsUnderACopyKeepsItsMemoryUntilTheCopyIsOver) {
  const auto copied = copied_late([](const Tensor& to, offload::CopyEngine& engine) {
    const std::vector<Take> takes(2, {kNumel, at::kFloat});
    PinnedArena arena(PinnedArena::bytes_for(takes), {.device = fake_device()});
    arena.take(kNumel, at::kFloat);
    const Tensor second = arena.take(kNumel, at::kFloat).fill_(7);
    engine.start(offload::Direction::kToDevice, to, second);
  });
  EXPECT_TRUE(copied.eq(7).all().item<bool>());
}

TEST_F(PageLockedTest, AStagingBufferThatEndsUnderACopyOfAPartKeepsItsMemoryUntilTheCopyIsOver) {
  const auto copied = copied_late([](const Tensor& to, offload::CopyEngine& engine) {
    comm::detail::StagingBuffer buffer(fake_device());
    const Tensor staged = buffer.take(2 * kNumel, at::kFloat).fill_(7);
    engine.start(offload::Direction::kToDevice, to, staged.narrow(0, kNumel, kNumel));
  });
  EXPECT_TRUE(copied.eq(7).all().item<bool>());
}

TEST_F(PageLockedTest, ACopyToTheHostThatIsLateWritesToNobodyElsesMemory) {
  const auto engine = offload::CopyEngine::make(fake_device());
  const Tensor from = torch::full({kNumel}, 3.0F, fake_device());
  std::vector<Tensor> taken;
  {
    const HeldStream held(compute());
    {
      const std::vector<Take> takes(2, {kNumel, at::kFloat});
      PinnedArena arena(PinnedArena::bytes_for(takes), {.device = fake_device()});
      arena.take(kNumel, at::kFloat);
      engine->start(offload::Direction::kToHost, arena.take(kNumel, at::kFloat), from);
    }
    taken = taken_by_others();
  }
  engine->wait_for_device();
  for (const Tensor& of_others : taken) EXPECT_TRUE(of_others.eq(9).all().item<bool>());
}

// Whatever LibTorch is told of, or not: the block is found by the address.
TEST_F(PageLockedTest, ABlockIsKnownThroughWhateverTensorItIsSeen) {
  using Share = std::function<Tensor(const Tensor& values)>;  // [2 * kNumel] -> [kNumel]
  const std::vector<Share> shares = {
      [](const Tensor& values) { return values.narrow(0, 1, kNumel); },
      [](const Tensor& values) {
        return values.view({2, -1})[1];
      },
      [](const Tensor& values) {
        return torch::from_blob(values.data_ptr<float>() + 3, {kNumel}, at::kFloat);
      },
      [](const Tensor& values) {
        const c10::Storage within = memory::storage_within(values, /*offset=*/5, kNumel);
        return memory::tensor_in(within, torch::empty({kNumel}), /*offset=*/0, at::kFloat);
      }};
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto copied = copied_late([&](const Tensor& to, offload::CopyEngine&) {
      const Tensor values =
          page_locked(2 * kNumel * 4, {.device = fake_device(), .alignment = 4096})
              .view(at::kFloat);
      start_copy(to, shares[i](values.fill_(7)));
    });
    EXPECT_TRUE(copied.eq(7).all().item<bool>()) << i;
  }
}

TEST_F(PageLockedTest, ABlockIsUsedAgainWhenItsLastCopyIsOverOnEveryStream) {
  const Tensor to = torch::zeros({kNumel}, fake_device());
  const Stream idle = Stream::another(fake_device()), late = Stream::another(fake_device());
  const auto take = [] { return page_locked(kNumel * 4, {.device = fake_device()}); };
  const void* data = nullptr;
  {
    const HeldStream held(compute());
    late.wait_for(Stream::current(fake_device()));
    {
      const Tensor values = take().view(at::kFloat);
      data = values.data_ptr();
      for (const Stream& stream : {late, idle}) {
        const StreamScope scope(stream);
        start_copy(to, values);
      }
    }
    idle.record().synchronize();
    EXPECT_NE(take().data_ptr(), data);
  }
  finish_fake_work();
  // The first of them gives it back to LibTorch's cache, which may have noted the copies too.
  std::vector<const void*> seen;
  for (int i = 0; i < 2; ++i, finish_fake_work()) seen.push_back(take().data_ptr());
  EXPECT_THAT(seen, ::testing::Contains(data));
}

TEST_F(PageLockedTest, MemoryThatNoCopyUsesIsUsedAgainAtOnce) {
  const auto take = [] { return page_locked(3000, {.device = fake_device()}).data_ptr(); };
  EXPECT_EQ(take(), take());
}

TEST_F(PageLockedTest, IsAlignedAndKnownToBePageLocked) {
  for (const int64_t alignment : {64, 512, 4096, 65536}) {
    const Tensor memory = page_locked(1000, {.device = fake_device(), .alignment = alignment});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % static_cast<uintptr_t>(alignment),
              0);
    EXPECT_TRUE(memory.is_pinned());
    EXPECT_EQ(memory.numel(), 1000);
  }
  EXPECT_EQ(page_locked(0, {.device = fake_device()}).numel(), 0);
}

TEST_F(PageLockedTest, LetsGoOfWhatItKeepsWithTheTensorAndNotWithTheCopy) {
  auto kept = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = kept;
  const auto copied = copied_late([&](const Tensor& to, offload::CopyEngine&) {
    const Tensor memory =
        page_locked(kNumel * 4, {.device = fake_device(), .kept = std::exchange(kept, nullptr)});
    start_copy(to, memory.view(at::kFloat).fill_(7));
    EXPECT_FALSE(watched.expired());
  });
  EXPECT_TRUE(watched.expired());
  EXPECT_TRUE(copied.eq(7).all().item<bool>());
}

TEST_F(PageLockedTest, CopiesOfAHostTensorThatChangesAtOnceHaveWhatItHad) {
  Tensor copied;
  {
    const HeldStream held(compute());
    Tensor from = torch::arange(12).view({3, 4});
    copied = start_copy_to_device(from, fake_device());
    from.fill_(-1);
    taken_by_others();
  }
  EXPECT_TRUE(torch::equal(copied.cpu(), torch::arange(12).view({3, 4})));
  const Tensor on_host = torch::ones({3});
  EXPECT_TRUE(start_copy_to_device(on_host, c10::kCPU).is_same(on_host));
}

TEST_F(PageLockedTest, ACopyToTheHostArrivesWhileTheHostGoesOn) {
  const Tensor from =
      torch::full({2, 3}, 5.0, torch::TensorOptions(fake_device()).dtype(at::kDouble));
  reset_fake_counters();
  ArrivingCopy copy;
  {
    const HeldStream held(compute());
    copy = start_copy_to_host(from.t());
    EXPECT_FALSE(copy.arrived.passed());
  }
  EXPECT_EQ(fake_counters().host_syncs, 0);
  copy.arrived.synchronize();
  EXPECT_TRUE(torch::equal(copy.values, torch::full({3, 2}, 5.0, at::kDouble)));
}

}  // namespace
}  // namespace zeropage::device::page_locked_test
