// A device that runs out of memory at any place of a step ends in one error, which the ledger wrote. On the fake accelerator, which
// tells of a shortage as LibTorch's CUDA allocator does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device_memory.h"
#include "tests/harness/device_ranks.h"
#include "tests/harness/errors.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "zeropage/bytes.h"
#include "zeropage/recompute.h"
#include "zeropage/zeropage.h"

namespace zeropage::out_of_memory_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

class OutOfMemoryTest : public ::testing::Test {
 protected:
  OutOfMemoryTest() {
    // What memory/cuda/device_memory.cpp does on CUDA.
    set_fake_shortage_observer([](int, size_t asked, size_t, size_t free) {
      memory::throw_out_of_memory({.device = kDevice,
                                   .asked_bytes = static_cast<int64_t>(asked),
                                   .free_bytes = static_cast<int64_t>(free)});
    });
  }
  ~OutOfMemoryTest() override {
    set_fake_memory_limit(0, 0);
    finish_fake_work();
    set_fake_shortage_observer({});
  }

 private:
  const FakeMemoryOnLedgers on_ledgers_;
};

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// What a step says that has so many bytes on the device; "" if they are enough.
std::string said_with(int64_t room_bytes, const Options& options) {
  finish_fake_work();
  set_fake_memory_limit(0, fake_memory(0).current_bytes + room_bytes);
  return error_of([&] {
    on_devices(Carrier::kDevice, 1, [&](comm::World& world) {
      DistributedDataParallel<Transformer> model(make_on<Transformer>(world.device()), world,
                                                 options);
      Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
      checkpointing::Recompute recompute(
          checkpointing::RecomputeOptions{.least_bytes = 1, .device = kDevice});
      for (int step = 0; step < 2; ++step) {
        const auto samples = samples_on(world.device(), world.rank(), step);
        torch::Tensor loss;
        {
          const checkpointing::ActivationScope scope(recompute);
          loss = loss_of(model(samples.inputs), samples);
        }
        loss.backward();
        optimizer.step();
      }
    });
  });
}

TEST_F(OutOfMemoryTest, EndsInOneMessageOfOursWhereverAStepIs) {
  Options replicated, offloaded;
  offloaded.stage = Stage::kParameters;
  offloaded.offload.optimizer = memory::Tier::kHost;
  std::string all;
  for (const Options& options : {replicated, offloaded}) {
    std::string said;
    for (int64_t room = 4_KiB; !(said = said_with(room, options)).empty(); room += 8_KiB) {
      const size_t refused = count(said, " before any activation");
      EXPECT_EQ(count(said, " asked for, ") + refused, 1U) << said;
      EXPECT_EQ(count(said, "most is held by"), 1U - refused) << said;
      EXPECT_THAT(said, Not(HasSubstr("is out of memory"))) << "the allocator's own error";
      all += said;
    }
  }
  EXPECT_THAT(all, HasSubstr("of activation in forward asked for"));
  EXPECT_THAT(all,
              HasSubstr("of gradient in backward (torch::autograd::AccumulateGrad) asked for"));
  EXPECT_THAT(all, HasSubstr("the model needs"));
  EXPECT_THAT(all, HasSubstr("the optimizer with gradients needs"));
}

}  // namespace
}  // namespace zeropage::out_of_memory_test
