// Communicators of an accelerator, on the fake one, whose streams are late by random times.
#include "comm/devices/device_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/devices/staged_communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "tests/harness/contributions.h"
#include "tests/harness/delays.h"
#include "tests/harness/device_ranks.h"
#include "tests/harness/errors.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/ranks.h"
#include "zeropage/communicator.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::device_communicator_test {
namespace {

using ::testing::AllOf;
using testing::contribution;
using testing::error_of;
using testing::fake_device;
using ::testing::HasSubstr;
using testing::HeldStream;
using testing::message_of;
using testing::RankOptions;
using testing::run_ranks;
using testing::tree_sum;
using testing::try_ranks;

using testing::FakeBackend;

enum class Way : uint8_t {
  kStagedGloo,
  kStagedShared,
  kStagedTwoLevels,
  kFast,
  kFixed,
  kDelayed,
  kOwnStream,  // the backend has a stream of its own for everything
};

RankOptions options_for(Way way, int size) {
  testing::register_fake_accelerator();
  RankOptions options;
  if (way >= Way::kFast) {
    const bool fast = way == Way::kFast || way == Way::kOwnStream;
    options.decorate = testing::over_fake_backend(
        fast ? ReductionOrder::kFast : ReductionOrder::kFixed,
        way == Way::kOwnStream ? FakeBackend::Streams::kOwnAlone : FakeBackend::Streams::kAsNccl);
    if (way == Way::kDelayed) {
      options.decorate = [make = options.decorate](std::unique_ptr<Communicator> host) {
        return std::make_unique<testing::DelayedCommunicator>(make(std::move(host)),
                                                              std::chrono::milliseconds(10));
      };
    }
    return options;
  }
  options.device = c10::DeviceType::PrivateUse1;
  options.transport = way == Way::kStagedGloo ? Transport::kGloo : Transport::kShared;
  if (size == 1) {
    options.decorate = [](std::unique_ptr<Communicator> solo) {
      return make_staged_communicator(std::make_unique<SoloCommunicator>(), solo->device());
    };
  } else if (way == Way::kStagedTwoLevels) {
    options.transport = Transport::kAuto;
    std::vector<int> hosts;
    for (int rank = 0; rank < size; ++rank) hosts.push_back(2 * rank / size);
    options.hosts = testing::host_labels(hosts);
  }
  return options;
}

class DeviceCommunicatorTest : public ::testing::TestWithParam<std::tuple<Way, int>> {
 protected:
  DeviceCommunicatorTest() { testing::register_fake_accelerator(); }
  ~DeviceCommunicatorTest() override { testing::set_fake_delays(0, {}); }

  Way way() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  bool needs_the_host() const { return way() < Way::kFast || way() == Way::kDelayed; }

  void run(const testing::RankFunction& fn) const {
    const RankOptions options = options_for(way(), size());
    testing::set_fake_delays(17, std::chrono::microseconds(300));
    run_ranks(
        size(),
        [&](World& world) {
          EXPECT_EQ(world.device(), fake_device(static_cast<c10::DeviceIndex>(world.rank())));
          fn(world);
        },
        options);
  }
};

// What the rank contributes, on its device, by work that is still queued when this returns.
torch::Tensor given(const World& world, int64_t numel, torch::ScalarType dtype = torch::kFloat32) {
  return contribution(world.rank(), numel, dtype).to(world.device()).neg_().neg_();
}

// Ragged, from nothing to several segments.
const std::vector<int64_t> kNumels = {0, 1, 5, 1000, 100'003, 300'001};

TEST_P(DeviceCommunicatorTest, AllReduceGivesTheHostsBitsAfterWhatWasEnqueued) {
  run([&](World& world) {
    for (const int64_t numel : kNumels) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
        const auto tensor = given(world, numel);
        world.communicator().all_reduce(tensor, op, "a test").wait();
        // Enqueued behind the wait, so it must find the result.
        const auto seen = tensor.clone();
        auto expected = tree_sum(0, size(), numel);
        if (op == ReduceOp::kMean) expected = expected / size();
        EXPECT_TRUE(torch::equal(seen.cpu(), expected)) << numel;
      }
    }
  });
}

TEST_P(DeviceCommunicatorTest, ReduceScatterGivesTheMeanOfTheOwnSliceAndLeavesTheRest) {
  run([&](World& world) {
    for (const int64_t slice : {1, 257, 100'001}) {
      const int64_t numel = slice * size();
      const auto whole = given(world, numel);
      world.communicator().reduce_scatter(whole, ReduceOp::kMean, "a test").wait();
      const auto seen = whole.clone();
      auto expected = contribution(world.rank(), numel);
      expected.narrow(0, world.rank() * slice, slice)
          .copy_((tree_sum(0, size(), numel) / size()).narrow(0, world.rank() * slice, slice));
      EXPECT_TRUE(torch::equal(seen.cpu(), expected)) << slice;
    }
  });
}

TEST_P(DeviceCommunicatorTest, LowPrecisionRoundsOnceInTheFixedOrder) {
  if (way() == Way::kFast || way() == Way::kOwnStream) return;
  run([&](World& world) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      for (const int64_t numel : {5, 30'001}) {
        const auto tensor = given(world, numel, dtype);
        world.communicator().all_reduce(tensor, ReduceOp::kMean, "a test").wait();
        EXPECT_TRUE(
            torch::equal(tensor.cpu(), (tree_sum(0, size(), numel, dtype) / size()).to(dtype)))
            << dtype << numel;
      }
    }
  });
}

TEST_P(DeviceCommunicatorTest, ReducesIntegersAndMaxima) {
  run([&](World& world) {
    const auto options = torch::TensorOptions(world.device());
    const auto mean = torch::full({7}, 2 * world.rank() + 1, options.dtype(torch::kInt64));
    world.communicator().all_reduce(mean, ReduceOp::kMean, "a test").wait();
    EXPECT_TRUE(mean.cpu().eq(size()).all().item<bool>());
    const auto most = torch::full({7}, world.rank() + 1, options.dtype(torch::kByte));
    world.communicator().all_reduce(most, ReduceOp::kMax, "a test").wait();
    EXPECT_TRUE(most.cpu().eq(size()).all().item<bool>());
  });
}

TEST_P(DeviceCommunicatorTest, AllGatherBringsEverySliceIntoPlace) {
  run([&](World& world) {
    for (const auto& [dtype, slice] : {std::pair<torch::ScalarType, int64_t>{torch::kFloat32, 4097},
                                       {torch::kBFloat16, 1},
                                       {torch::kInt64, 100'001}}) {
      const auto whole =
          torch::zeros({slice * size()}, torch::TensorOptions(world.device()).dtype(dtype));
      whole.narrow(0, world.rank() * slice, slice).fill_(world.rank() + 1);
      world.communicator().all_gather(whole, "a test").wait();
      const auto seen = whole.clone().cpu();
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_TRUE(seen.narrow(0, rank * slice, slice).eq(rank + 1).all().item<bool>());
      }
    }
  });
}

TEST_P(DeviceCommunicatorTest, BroadcastReachesAllFromAnyRoot) {
  run([&](World& world) {
    for (int root = 0; root < size(); ++root) {
      const auto tensor = given(world, 12'345);
      world.communicator().broadcast(tensor, root, "a test").wait();
      EXPECT_TRUE(torch::equal(tensor.clone().cpu(), contribution(root, 12'345))) << root;
    }
  });
}

TEST_P(DeviceCommunicatorTest, SendsGoAroundARing) {
  run([&](World& world) {
    if (size() == 1) return;
    const int next = (world.rank() + 1) % size();
    const int previous = (world.rank() + size() - 1) % size();
    const auto given_on = given(world, 1000);
    const auto received = torch::zeros_like(given_on);
    Communicator& communicator = world.communicator();
    if (world.rank() == 0) {
      communicator.send(given_on, next, "a test").wait();
      communicator.recv(received, previous, "a test").wait();
    } else {
      communicator.recv(received, previous, "a test").wait();
      communicator.send(given_on, next, "a test").wait();
    }
    EXPECT_TRUE(torch::equal(received.clone().cpu(), contribution(previous, 1000)));
  });
}

TEST_P(DeviceCommunicatorTest, OperationsInFlightEndInAnyOrderOfWaiting) {
  run([&](World& world) {
    const auto on_host = contribution(world.rank(), 5000);
    std::vector<torch::Tensor> tensors;
    std::vector<Pending> pending;
    for (const int64_t numel : {20'000, 1000, 40'000}) {
      tensors.push_back(given(world, numel));
      pending.push_back(world.communicator().all_reduce(tensors.back(), ReduceOp::kSum, "a test"));
    }
    pending.push_back(world.communicator().all_reduce(on_host, ReduceOp::kSum, "the host's"));
    for (size_t i = pending.size(); i-- > 0;) pending[i].wait();
    EXPECT_TRUE(torch::equal(on_host, tree_sum(0, size(), 5000)));
    for (const auto& tensor : tensors) {
      EXPECT_TRUE(torch::equal(tensor.clone().cpu(), tree_sum(0, size(), tensor.numel())));
    }
    world.communicator().barrier("a test").wait();
  });
}

TEST_P(DeviceCommunicatorTest, ReduceGivesTheRootTheHostsBitsAndLeavesTheOthers) {
  run([&](World& world) {
    for (const int64_t numel : kNumels) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
        const int root = size() - 1;
        const auto tensor = given(world, numel);
        world.communicator().reduce(tensor, op, root, "a test").wait();
        const auto seen = tensor.clone();
        auto expected = contribution(world.rank(), numel);
        if (world.rank() == root) expected = tree_sum(0, size(), numel);
        if (world.rank() == root && op == ReduceOp::kMean) expected = expected / size();
        EXPECT_TRUE(torch::equal(seen.cpu(), expected)) << numel;
      }
    }
  });
}

TEST_P(DeviceCommunicatorTest, SlicesGoToARootAndBackAndFromEachToEach) {
  run([&](World& world) {
    const int root = size() / 2;
    const bool is_root = world.rank() == root;
    for (const int64_t slice : {1, 1000, 100'003}) {
      const auto own = given(world, slice);
      const auto whole = torch::zeros({slice * size()}, own.options());
      whole.narrow(0, root * slice, slice).copy_(own);
      world.communicator().gather(is_root ? whole : own, root, "a test").wait();
      for (int rank = 0; rank < size() && is_root; ++rank) {
        EXPECT_TRUE(
            torch::equal(whole.narrow(0, rank * slice, slice).cpu(), contribution(rank, slice)));
      }
      const auto taken = torch::zeros_like(own);
      world.communicator().scatter(is_root ? whole : taken, root, "a test").wait();
      if (!is_root) {
        EXPECT_TRUE(torch::equal(taken.cpu(), contribution(world.rank(), slice)));
      }
      for (const bool on_host : {false, true}) {
        auto leaving = given(world, slice * size());
        if (on_host) leaving = leaving.cpu();
        const auto arriving = torch::zeros_like(leaving);
        world.communicator().all_to_all(leaving, arriving, "a test").wait();
        for (int rank = 0; rank < size(); ++rank) {
          EXPECT_TRUE(torch::equal(
              arriving.narrow(0, rank * slice, slice).cpu(),
              contribution(rank, slice * size()).narrow(0, world.rank() * slice, slice)))
              << slice << " of " << rank;
        }
      }
    }
  });
}

TEST_P(DeviceCommunicatorTest, ABlockMayBeUsedAnewOnceItsOperationWasWaitedFor) {
  run([&](World& world) {
    for (int round = 0; round < 5; ++round) {
      auto tensor = given(world, 30'000);
      world.communicator().all_reduce(tensor, ReduceOp::kSum, "a test").wait();
      const auto seen = tensor.clone();
      tensor = torch::Tensor();
      const auto other = torch::full({30'000}, -7, torch::TensorOptions(world.device()));
      EXPECT_TRUE(torch::equal(seen.cpu(), tree_sum(0, size(), 30'000)));
      EXPECT_TRUE(other.cpu().eq(-7).all().item<bool>());
    }
  });
}

TEST_P(DeviceCommunicatorTest, ACallReturnsWhileTheStreamIsBusy) {
  run([&](World& world) {
    const auto tensor = given(world, 1000);
    const auto stream =
        c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getStream(world.device());
    auto busy = std::make_unique<HeldStream>(stream);
    tensor.mul_(1);
    const Pending pending = world.communicator().all_reduce(tensor, ReduceOp::kSum, "a test");
    EXPECT_FALSE(pending.done());
    if (!needs_the_host()) pending.wait();
    EXPECT_FALSE(pending.done());
    busy.reset();
    pending.synchronize();
    EXPECT_TRUE(pending.done());
    pending.wait();
    EXPECT_TRUE(torch::equal(tensor.cpu(), tree_sum(0, size(), 1000)));
  });
}

TEST_P(DeviceCommunicatorTest, CountsBytesAsTheHostDoesAndMovesNoGradient) {
  run([&](World& world) {
    const int64_t slice = 100'000;
    const auto whole = torch::zeros({slice * size()}, torch::TensorOptions(world.device()));
    const auto version = whole._version();
    Communicator& communicator = world.communicator();
    communicator.all_gather(whole, "a test").wait();
    communicator.reduce_scatter(whole, ReduceOp::kSum, "a test").wait();
    communicator.all_reduce(whole, ReduceOp::kSum, "a test").synchronize();
    EXPECT_EQ(whole._version(), version);
    if (way() == Way::kStagedTwoLevels) return;
    const int64_t one_pass = 4 * slice * (size() - 1);
    EXPECT_EQ(communicator.wire_traffic().all_gather.bytes, one_pass);
    EXPECT_EQ(communicator.wire_traffic().reduce_scatter.bytes, one_pass);
    EXPECT_EQ(communicator.wire_traffic().all_reduce.bytes, 2 * one_pass);
  });
}

TEST_P(DeviceCommunicatorTest, RefusesAnotherDevicesTensorInWords) {
  run([&](World& world) {
    const auto elsewhere = torch::zeros({8 * size()}, torch::TensorOptions(fake_device(7)));
    EXPECT_THAT(error_of([&] { world.communicator().all_gather(elsewhere, "page \"a\""); }),
                AllOf(HasSubstr("all_gather of page \"a\": the tensor is on "),
                      HasSubstr("copy it there first")));
  });
}

std::string case_name(const ::testing::TestParamInfo<std::tuple<Way, int>>& info) {
  constexpr const char* kNames[] = {"StagedGloo", "StagedShared", "StagedTwoLevels", "Fast",
                                    "Fixed",      "Delayed",      "OwnStream"};
  return c10::str(kNames[static_cast<size_t>(std::get<0>(info.param))], std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(WaysAndRanks, DeviceCommunicatorTest,
                         ::testing::Combine(::testing::Values(Way::kStagedGloo, Way::kStagedShared,
                                                              Way::kStagedTwoLevels, Way::kFast,
                                                              Way::kFixed, Way::kDelayed,
                                                              Way::kOwnStream),
                                            ::testing::Values(1, 2, 3, 4)),
                         case_name);

TEST(DeviceCommunicatorStreamTest, CollectivesRunOnOurStreamWhereTheBackendLetsThem) {
  testing::register_fake_accelerator();
  const c10::Device device = fake_device();
  for (const auto order : {ReductionOrder::kFast, ReductionOrder::kFixed}) {
    for (const auto streams : {FakeBackend::Streams::kAsNccl, FakeBackend::Streams::kOwnAlone}) {
      const auto backend =
          c10::make_intrusive<FakeBackend>(std::make_unique<SoloCommunicator>(), device, streams);
      const auto communicator = make_device_communicator(
          std::make_unique<SoloCommunicator>(),
          {.backend = backend, .device = device, .order = order, .transport = "fake"});
      const auto tensor = torch::ones({1000}, torch::TensorOptions(device));
      communicator->all_gather(tensor, "a test").wait();
      communicator->reduce_scatter(tensor, ReduceOp::kSum, "a test").wait();
      communicator->all_reduce(tensor, ReduceOp::kMean, "a test").wait();
      communicator->broadcast(tensor, 0, "a test").wait();
      EXPECT_TRUE(tensor.cpu().eq(1).all().item<bool>());
      // In the fixed order an all-reduce is two operations.
      const int64_t operations = order == ReductionOrder::kFixed ? 5 : 4;
      EXPECT_EQ(backend->hops(), streams == FakeBackend::Streams::kAsNccl ? 0 : operations);
    }
  }
}

TEST(DeviceCommunicatorFailureTest, ARankThatIsBusyIsWaitedForBeyondTheDeadline) {
  testing::register_fake_accelerator();
  testing::run_ranks(2,
                     [](World& world) {
                       const auto tensor =
                           torch::ones({1000}, torch::TensorOptions(world.device()));
                       Communicator& communicator = world.communicator();
                       communicator.all_reduce(tensor, ReduceOp::kSum, "page \"a\"").synchronize();
                       if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(3));
                       communicator.all_reduce(tensor, ReduceOp::kSum, "page \"b\"").synchronize();
                       EXPECT_TRUE(tensor.cpu().eq(4).all().item<bool>());
                     },
                     {.deadline = std::chrono::seconds(1),
                      .decorate = testing::over_fake_backend(ReductionOrder::kFast)});
}

TEST(DeviceCommunicatorFailureTest, ABusyRankIsWaitedForUpToTheBusyLimit) {
  testing::register_fake_accelerator();
  const auto errors = try_ranks(
      2,
      [](World& world) {
        const auto tensor = torch::ones({1000}, torch::TensorOptions(world.device()));
        Communicator& communicator = world.communicator();
        communicator.all_reduce(tensor, ReduceOp::kSum, "page \"a\"").synchronize();
        if (world.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::seconds(4));
          return;
        }
        const Pending pending = communicator.all_gather(tensor, "page \"b\"");
        pending.wait();  // the host does not
        const std::string error = error_of([&] { pending.synchronize(); });
        EXPECT_THAT(error,
                    AllOf(HasSubstr("[rank 0/2] all_gather #1 of page \"b\" (3.9 KiB): rank 1 was "
                                    "waited for in vain, for 2 s"),
                          HasSubstr("raise WorldOptions::busy_limit")));
        EXPECT_EQ(error_of([&] { pending.wait(); }), error);
        EXPECT_EQ(error_of([&] { communicator.all_gather(tensor, "page \"c\""); }), error);
      },
      {.deadline = std::chrono::seconds(1),
       .busy_limit = std::chrono::seconds(2),
       .decorate = testing::over_fake_backend(ReductionOrder::kFast)});
  EXPECT_EQ(message_of(errors[0]), "");
}

TEST(DeviceCommunicatorFailureTest, RanksThatCallDifferentOperationsAreToldWithinTwoSeconds) {
  testing::register_fake_accelerator();
  const auto begun = std::chrono::steady_clock::now();
  const auto errors =
      try_ranks(2,
                [](World& world) {
                  const auto tensor = torch::ones({1000}, torch::TensorOptions(world.device()));
                  Communicator& communicator = world.communicator();
                  communicator.all_reduce(tensor, ReduceOp::kSum, "page \"a\"").synchronize();
                  if (world.rank() == 1) {
                    communicator.all_gather(tensor, "page \"c\"").synchronize();
                  } else {
                    communicator.all_reduce(tensor, ReduceOp::kSum, "page \"b\"").synchronize();
                  }
                },
                {.decorate = testing::over_fake_backend(ReductionOrder::kFast)});
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
  EXPECT_THAT(message_of(errors[0]),
              AllOf(HasSubstr("all_reduce #1 of page \"b\""),
                    HasSubstr("rank 1 is out of step: it waits in all_gather #1 of page \"c\"")));
  EXPECT_THAT(message_of(errors[1]), HasSubstr("out of step"));
}

TEST(DeviceCommunicatorFailureTest, ALostRankIsNamedLongBeforeTheDeadline) {
  testing::register_fake_accelerator();
  const auto begun = std::chrono::steady_clock::now();
  const auto errors =
      try_ranks(3,
                [](World& world) {
                  const auto tensor = torch::ones({999}, torch::TensorOptions(world.device()));
                  world.communicator().all_gather(tensor, "page \"a\"").synchronize();
                  if (world.rank() == 1) throw std::runtime_error("rank 1 has had enough");
                  world.communicator().all_gather(tensor, "page \"b\"").synchronize();
                },
                {.deadline = std::chrono::seconds(600),
                 .decorate = testing::over_fake_backend(ReductionOrder::kFast)});
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("all_gather #1 of page \"b\" (3.9 KiB): lost rank 1"));
  EXPECT_THAT(message_of(errors[2]), HasSubstr("lost rank 1"));
}

}  // namespace
}  // namespace zeropage::comm::device_communicator_test
