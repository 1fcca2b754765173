// Gradients that wait with autograd on an accelerator: copied together, and never more of them than
// half a page.
#include <algorithm>

#include <gtest/gtest.h>

#include "tests/harness/device_ranks.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "zero/gradients/bucket.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/zeropage.h"

namespace zeropage::waiting_gradients_test {
namespace {

using namespace zeropage::testing;
using memory::operator""_KiB;

constexpr int64_t kWidth = 64;
constexpr int64_t kWeightBytes = kWidth * kWidth * 4;

TEST(WaitingGradientsTest, SumUpOverPagesUntilTheyAreForgotten) {
  zero::WaitingGradients waiting(2);
  waiting.add(0, 3, 10);
  waiting.add(1, 4, 20);
  waiting.add(0, 5, 30);
  EXPECT_EQ(waiting.of(0), (std::vector<size_t>{3, 5}));
  EXPECT_EQ(waiting.numel(), 60);
  waiting.forget(0);
  EXPECT_TRUE(waiting.of(0).empty());
  EXPECT_EQ(waiting.numel(), 20);
}

struct GroupImpl : torch::nn::Module {
  GroupImpl(int64_t used, int64_t unused) : used(used) {
    for (int64_t layer = 0; layer < used + unused; ++layer) {
      layers.push_back(
          register_module(c10::str("layer", layer),
                          torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
    }
  }
  const int64_t used;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Group);

// Layers in groups; each group is an element of a list, and so a page.
struct GroupsImpl : torch::nn::Module {
  // unused: of each group, besides.
  GroupsImpl(int64_t groups, int64_t layers, int64_t unused) {
    for (int64_t group = 0; group < groups; ++group) all->push_back(Group(layers, unused));
    register_module("all", all);
  }

  torch::Tensor forward(torch::Tensor x) {
    for (const auto& module : *all) {
      GroupImpl& group = *module->as<Group>();
      for (int64_t layer = 0; layer < group.used; ++layer) {
        x = group.layers[static_cast<size_t>(layer)]->forward(x);
        if (look) x.register_hook([this](const torch::Tensor&) { look(); });
      }
    }
    return x;
  }

  torch::nn::ModuleList all;
  std::function<void()> look;
};
TORCH_MODULE(Groups);

struct Seen {
  int64_t most_waiting_bytes = 0;
  int64_t pages = 0;
  int64_t list_copies = 0;  // of both ranks
  int64_t copies = 0;
  int64_t zeros = 0;
};

class GradientsOnADeviceTest : public ::testing::TestWithParam<int> {
 protected:
  // One backward on two ranks.
  Seen run(int64_t groups, int64_t layers, int64_t unused) const {
    Seen seen;
    run_ranks(
        2,
        [&](comm::World& world) {
          Groups module(groups, layers, unused);
          module->to(world.device());
          Options options;
          options.stage = stage_of(GetParam());
          options.page_bytes = 16 * (layers + unused) * kWeightBytes / 2;
          DistributedDataParallel<Groups> model(module, world, options);
          const auto x = torch::ones({1, kWidth}, torch::TensorOptions(world.device()));
          const memory::Ledger& ledger = *memory::Ledger::current();
          // Autograd's thread charges no ledger with what it makes.
          const auto of_autograd = [&] {
            return fake_memory(static_cast<c10::DeviceIndex>(world.rank())).current_bytes -
                   ledger.now(c10::DeviceType::PrivateUse1).total();
          };
          model(x).sum().backward();
          model.module()->zero_grad();
          int64_t most = 0;
          module->look = [&, before = of_autograd()] {
            most = std::max(most, of_autograd() - before);
          };
          world.communicator().barrier("counting begins").wait();
          if (world.rank() == 0) reset_fake_counters();
          world.communicator().barrier("counting has begun").wait();
          model(x).sum().backward();
          world.communicator().barrier("counting ends").wait();
          module->look = {};
          if (world.rank() != 0) return;
          seen = {
              .most_waiting_bytes = most,
              .pages = static_cast<int64_t>(sharded_parameters_of(model).pages->layouts().size()),
              .list_copies = fake_launches()["aten::_foreach_copy_"],
              .copies = fake_launches()["aten::copy_"],
              .zeros = fake_launches()["aten::zero_"] + fake_launches()["aten::_foreach_zero_"]};
        },
        on_fake_devices(Carrier::kDevice, 2));
    return seen;
  }

 private:
  const FakeMemoryOnLedgers on_ledgers_;
};

// What is not a weight's gradient, and the gradient that is made while others wait.
constexpr int64_t kBesideBytes = kWeightBytes + 8_KiB;

TEST_P(GradientsOnADeviceTest, OfAPageAreCopiedByTwoCallsAndWaitForHalfOfIt) {
  const Seen seen = run(/*groups=*/3, /*layers=*/8, /*unused=*/0);
  ASSERT_EQ(seen.pages, 3);
  EXPECT_EQ(seen.list_copies, 2 * 2 * seen.pages);
  // At stages 2 and 3 what was reduced is copied to where it stays.
  EXPECT_LE(seen.copies, GetParam() < 2 ? 0 : 2 * 2 * seen.pages);
  EXPECT_GE(seen.most_waiting_bytes, 4 * kWeightBytes) << "it looked at the wrong moments";
  EXPECT_LE(seen.most_waiting_bytes, 4 * kWeightBytes + kBesideBytes);
}

TEST_P(GradientsOnADeviceTest, OfPagesThatAreNeverCompleteWaitForHalfAPageOfAllOfThem) {
  const Seen seen = run(/*groups=*/6, /*layers=*/3, /*unused=*/1);
  ASSERT_EQ(seen.pages, 6);
  EXPECT_LE(seen.most_waiting_bytes, 2 * kWeightBytes + kBesideBytes);
}

TEST_P(GradientsOnADeviceTest, OfUnusedParametersAreZeroedInOneCall) {
  const Seen few = run(/*groups=*/2, /*layers=*/2, /*unused=*/1);
  const Seen many = run(/*groups=*/2, /*layers=*/2, /*unused=*/9);
  ASSERT_EQ(many.pages, 2);
  EXPECT_GE(few.zeros, 2 * few.pages) << "it looked for another operator";
  EXPECT_EQ(many.zeros, few.zeros);
}

INSTANTIATE_TEST_SUITE_P(Stages, GradientsOnADeviceTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return c10::str("Stage", info.param); });

}  // namespace
}  // namespace zeropage::waiting_gradients_test
