// Activation offload on an accelerator whose streams are late by random times: the host's bits, and
// no more on its way than the bound.
#include <filesystem>
#include <thread>
#include <unistd.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "offload/nvme_heap.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/activation_offload.h"
#include "zeropage/bytes.h"
#include "zeropage/ledger.h"
#include "zeropage/recompute.h"

namespace zeropage::checkpointing::device_offload_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::operator""_KiB;
using ::testing::Gt;
using ::testing::Le;

constexpr auto kLateBy = std::chrono::microseconds(300);
constexpr int64_t kActivationBytes = 64_KiB;

class DeviceOffloadTest : public ::testing::Test {
 protected:
  DeviceOffloadTest() {
    register_fake_accelerator();
    at::set_num_threads(1);
    torch::manual_seed(0);
    finish_fake_work();
    set_fake_delays(11, kLateBy);
  }
  ~DeviceOffloadTest() override {
    set_fake_delays(0, {});
    finish_fake_work();
  }

  int64_t offloaded_bytes() const { return ledger_->now()[Kind::kActivationOffloaded]; }

  const std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope_{ledger_};
};

// The first is the outermost.
using Policies = std::vector<ActivationPolicy*>;

// The gradients of two steps, on the host.
template <typename Module>
std::vector<torch::Tensor> train(Module module, const torch::Tensor& x, const Policies& policies) {
  std::vector<torch::Tensor> gradients;
  for (int step = 0; step < 2; ++step) {
    module->zero_grad();
    std::vector<std::unique_ptr<ActivationScope>> scopes;
    for (ActivationPolicy* const policy : policies) {
      scopes.push_back(std::make_unique<ActivationScope>(*policy));
    }
    const auto loss = module->forward(x * (step + 1)).pow(2).sum();
    while (!scopes.empty()) scopes.pop_back();
    loss.backward();
    for (const auto& parameter : module->parameters()) {
      if (parameter.grad().defined()) gradients.push_back(parameter.grad().cpu());
    }
  }
  return gradients;
}

template <typename Module>
void expect_the_hosts_bits() {
  Module module;
  const auto x = torch::randn({6, 7});
  const auto expected = train(module, x, {});
  module->to(fake_device());
  const auto disk = std::make_shared<NvmeActivations>(NvmeActivationsOptions{
      .directory = std::filesystem::current_path(), .rank = static_cast<int>(::getpid())});
  struct Case {
    int64_t staging_bytes;
    std::shared_ptr<ActivationStore> store = nullptr;
  };
  // A bound that brings back all but the last, and one that most sources are still there under.
  for (const auto& [staging_bytes, store] : {Case{2_KiB}, Case{256_KiB}, Case{2_KiB, disk}}) {
    ActivationOffload offload({.least_bytes = 0, .staging_bytes = staging_bytes, .store = store});
    Recompute recompute(RecomputeOptions{.least_bytes = 1, .device = fake_device().type()});
    for (const auto& policies :
         {Policies{&offload}, Policies{&offload, &recompute}, Policies{&recompute, &offload}}) {
      const auto gradients = train(module, x.to(fake_device()), policies);
      ASSERT_EQ(gradients.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(torch::equal(gradients[i], expected[i]))
            << i << " by " << staging_bytes << " under " << policies.size() << " policies";
      }
    }
    if (staging_bytes == 2_KiB) {
      EXPECT_THAT(offload.statistics().fetched_ahead_bytes, Gt(0));
    }
    EXPECT_EQ(offload.statistics().host_bytes, 0);
  }
  EXPECT_GT(disk->heap().statistics().records_read, 0);
  EXPECT_EQ(disk->heap().held_bytes(), 0);
}

TEST_F(DeviceOffloadTest, GradientsHaveTheHostsBits) {
  expect_the_hosts_bits<Oddball>();
  expect_the_hosts_bits<ConvNet>();
  expect_the_hosts_bits<Transformer>();
}

// Operators of 64 KiB each that save what they give: [128, 128]
torch::Tensor chain(torch::Tensor x, int length) {
  for (int i = 0; i < length; ++i) x = i % 2 == 0 ? x.sigmoid() : x.tanh();
  return x.sum();
}

struct ChainRun {
  torch::Tensor gradient;  // on the host
  int64_t peak = 0;        // of the device
  ActivationOffloadStatistics statistics;
  FakeCounters counters;
};

ChainRun run_chain(int length, const ActivationOffloadOptions* options) {
  torch::manual_seed(1);
  const auto x = torch::randn({128, 128}).to(fake_device()).requires_grad_();
  finish_fake_work();
  ActivationOffload offload(options != nullptr ? *options : ActivationOffloadOptions());
  reset_fake_counters();
  reset_fake_peak(0);
  torch::Tensor loss;
  {
    const SavedTensorScope scope(options != nullptr ? offload.hooks() : nullptr);
    loss = chain(x, length);
  }
  loss.backward();
  ChainRun run;
  run.counters = fake_counters();
  run.gradient = x.grad().cpu();
  run.peak = fake_memory(0).peak_bytes;
  run.statistics = offload.statistics();
  return run;
}

TEST_F(DeviceOffloadTest, NoMoreIsOnItsWayThanTheBound) {
  constexpr int kLength = 40;
  const ActivationOffloadOptions tight{.staging_bytes = 2 * kActivationBytes};
  const ChainRun plain = run_chain(kLength, nullptr), run = run_chain(kLength, &tight);
  EXPECT_TRUE(torch::equal(run.gradient, plain.gradient));
  EXPECT_EQ(run.statistics.most_leaving_bytes, tight.staging_bytes);
  EXPECT_THAT(run.statistics.most_ahead_bytes, Le(tight.staging_bytes));
  EXPECT_EQ(run.statistics.host_peak_bytes, kLength * kActivationBytes);
  EXPECT_THAT(plain.peak, Gt(kLength * kActivationBytes));
  // What is on its way out or fetched ahead, x and its gradient, and what an operator works on.
  EXPECT_THAT(run.peak, Le(10 * kActivationBytes));
}

TEST_F(DeviceOffloadTest, OnlyEventsOrderTheCopies) {
  constexpr int kLength = 20;
  const ActivationOffloadOptions roomy;
  const ChainRun plain = run_chain(kLength, nullptr), run = run_chain(kLength, &roomy);
  EXPECT_EQ(run.counters.device_syncs, 0);
  EXPECT_EQ(run.counters.record_stream, plain.counters.record_stream);
  EXPECT_EQ(run.counters.host_syncs, plain.counters.host_syncs)
      << "the host waits for the bound only";
}

TEST_F(DeviceOffloadTest, ARetainedGraphRunsBackwardAgain) {
  const auto x = torch::randn({64, 64}).to(fake_device()).requires_grad_();
  const auto plain = torch::autograd::grad({chain(x, 12)}, {x})[0].cpu();
  ActivationOffload offload({.staging_bytes = 40_KiB});
  torch::Tensor loss;
  {
    const ActivationScope scope(offload);
    loss = chain(x, 12);
  }
  const auto first = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0].cpu();
  const auto second = torch::autograd::grad({loss}, {x})[0].cpu();
  EXPECT_TRUE(torch::equal(first, plain));
  EXPECT_TRUE(torch::equal(second, plain));
}

// The fake accelerator numbers its new streams. An ActivationOffloader takes one for copies out, then one back.
c10::Stream stream_from_now(int which) {
  const c10::Stream one =
      c10::impl::VirtualGuardImpl(fake_device().type()).getNewStream(fake_device());
  return c10::Stream(c10::Stream::UNSAFE, fake_device(), one.id() + which);
}

TEST_F(DeviceOffloadTest, AGraphThatStopsHalfWayDisturbsNobodyByWhatWasFetchedAhead) {
  set_fake_delays(0, {});
  const auto x = torch::randn({64, 64}).to(fake_device()).requires_grad_();
  const c10::Stream back = stream_from_now(2);
  ActivationOffload offload({.staging_bytes = 128_KiB});
  torch::Tensor middle, last, loss;
  {
    const ActivationScope scope(offload);
    middle = x.sigmoid().tanh().sigmoid().tanh().sigmoid().tanh().sigmoid() + 1;
    loss = middle.sigmoid();
    last = loss.detach();  // so that it need not be brought back
    loss = loss.sum();
  }
  finish_fake_work();
  std::vector<torch::Tensor> next;
  {
    const HeldStream held(back);
    torch::autograd::grad({loss}, {middle});
    EXPECT_EQ(offload.statistics().most_ahead_bytes, 7 * 16_KiB);
    loss.reset();
    middle.reset();
    EXPECT_EQ(offload.statistics().host_bytes, 0);
    // In the blocks that the copies are under way to.
    for (int i = 0; i < 12; ++i) next.push_back(torch::full({64, 64}, i, last.options()));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  finish_fake_work();
  for (size_t i = 0; i < next.size(); ++i) {
    EXPECT_TRUE(torch::equal(next[i].cpu(), torch::full({64, 64}, static_cast<float>(i)))) << i;
  }
}

// A store wants longer alignment than blocks of page-locked memory have, so copies begin inside of them.
TEST_F(DeviceOffloadTest, AGraphThatGoesWhileItsActivationsLeaveDisturbsNobodyOnTheHost) {
  set_fake_delays(0, {});
  const auto x = torch::randn({64, 64}).to(fake_device()).requires_grad_();
  const auto disk = std::make_shared<NvmeActivations>(NvmeActivationsOptions{
      .directory = std::filesystem::current_path(), .rank = static_cast<int>(::getpid())});
  const c10::Stream out = stream_from_now(1);
  ActivationOffload offload({.least_bytes = 0, .store = disk});
  std::vector<torch::Tensor> of_others;
  {
    const HeldStream held(out);
    {
      const ActivationScope scope(offload);
      chain(x, 6);
    }
    EXPECT_EQ(offload.statistics().host_bytes, 0);
    const auto pinned = torch::TensorOptions().pinned_memory(true);
    for (const int64_t bytes : {16_KiB, 32_KiB}) {
      for (int i = 0; i < 8; ++i) of_others.push_back(torch::full({bytes / 4}, i, pinned));
    }
  }
  finish_fake_work();
  for (size_t i = 0; i < of_others.size(); ++i) {
    EXPECT_TRUE(of_others[i].eq(static_cast<int>(i % 8)).all().item<bool>()) << i;
  }
}

TEST_F(DeviceOffloadTest, CompressedCopiesHaveTheHostsBits) {
  for (const Compression compression : {Compression::kBf16, Compression::k8Bit}) {
    const auto x = torch::randn({100, 50});
    const auto gradient = [&](c10::Device device) {
      const auto there = x.clone().to(device).requires_grad_();
      ActivationOffload offload({.least_bytes = 0, .compression = compression});
      torch::Tensor loss;
      {
        const ActivationScope scope(offload);
        loss = chain(there, 6);
      }
      loss.backward();
      return there.grad().cpu();
    };
    EXPECT_TRUE(torch::equal(gradient(fake_device()), gradient(torch::kCPU))) << name(compression);
  }
}

TEST_F(DeviceOffloadTest, CopiesAreChargedOnTheHostUntilTheyHaveEnded) {
  const auto x = torch::randn({128, 128}).to(fake_device()).requires_grad_();
  ActivationOffload offload;
  torch::Tensor loss;
  {
    const ActivationScope scope(offload);
    loss = chain(x, 10);
  }
  EXPECT_EQ(offloaded_bytes(), 10 * kActivationBytes);
  loss.backward();
  finish_fake_work();
  EXPECT_EQ(offload.statistics().host_bytes, 0);
  EXPECT_EQ(offloaded_bytes(), 0);
}

}  // namespace
}  // namespace zeropage::checkpointing::device_offload_test
