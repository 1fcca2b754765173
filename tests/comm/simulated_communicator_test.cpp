#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/ranks.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/simulation.h"
#include "zeropage/world.h"

namespace zeropage::comm::simulated_communicator_test {
namespace {

using ::testing::HasSubstr;

// A second a message, and a second for ten bytes within a host or for one between hosts.
SimulationOptions slow_links(int rank, const Topology& topology) {
  return {.rank = rank,
          .topology = topology,
          .within_host = {.latency_seconds = 1, .bytes_per_second = 10},
          .between_hosts = {.latency_seconds = 1, .bytes_per_second = 1}};
}

at::Tensor meta(int64_t numel) {
  return at::empty({numel}, at::TensorOptions().device(at::kMeta));
}

template <typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (...) {
    return testing::message_of(std::current_exception());
  }
  return "";
}

TEST(SimulatedCommunicatorTest, CountsEveryOperationOfOneRankAmong4096) {
  SimulatedCommunicator communicator({.rank = 4095, .topology = Topology::even(4096, 1)});
  communicator.all_gather(meta(4096 * 10), "a test").wait();
  communicator.reduce_scatter(meta(4096 * 10), ReduceOp::kMean, "a test").wait();
  communicator.all_reduce(meta(100), ReduceOp::kSum, "a test").wait();
  communicator.broadcast(meta(100), /*root=*/4095, "a test").wait();
  communicator.reduce(meta(4096 * 10), ReduceOp::kSum, /*root=*/0, "a test").wait();
  communicator.gather(meta(10), /*root=*/0, "a test").wait();
  communicator.scatter(meta(4096 * 10), /*root=*/4095, "a test").wait();
  communicator.all_to_all(meta(4096 * 10), meta(4096 * 10), "a test").wait();
  communicator.barrier("a test").wait();
  communicator.send(meta(100), 0, "a test").wait();
  communicator.recv(meta(100), 0, "a test").wait();
  EXPECT_EQ(communicator.wire_traffic(), (WireTraffic{.all_gather = {4095 * 40, 4095},
                                                      .reduce_scatter = {4095 * 40, 4095},
                                                      .all_reduce = {4095 * 400, 4095},
                                                      .broadcast = {12 * 400, 12},
                                                      .pair = {400, 1},
                                                      .barrier = {0, 12},
                                                      .reduce = {4096 * 40, 4096},
                                                      .gather = {40, 1},
                                                      .scatter = {4095 * 40, 4095},
                                                      .all_to_all = {4095 * 40, 4095}}));
  EXPECT_EQ(communicator.figures()[Operation::kPair].calls, 2);
}

TEST(SimulatedCommunicatorTest, RefusesWorldsThatItDoesNotSimulate) {
  EXPECT_THAT(error_of([] { SimulatedCommunicator({.topology = Topology::even(4097, 1)}); }),
              HasSubstr("at most 4096"));
  EXPECT_THAT(
      error_of([] { SimulatedCommunicator({.rank = 4, .topology = Topology::even(4, 1)}); }),
      HasSubstr("there is no rank 4 in a world of 4"));
  EXPECT_THAT(error_of([] {
                SimulatedCommunicator({.topology = Topology::even(4, 2), .between_hosts = {}});
              }),
              HasSubstr("SimulationOptions::between_hosts"));
  EXPECT_THAT(
      error_of([] {
        SimulatedCommunicator({.topology = Topology::even(4, 2), .failures = {{.lost_rank = 0}}});
      }),
      HasSubstr("expected another rank"));
}

TEST(SimulatedCommunicatorTest, TakesALatencyAMessageAndTheBytesOverTheBandwidth) {
  SimulatedCommunicator communicator(slow_links(0, Topology::even(4, 1)));
  communicator.all_gather(meta(4), "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kAllGather].seconds, 3 * (1 + 4.0));
  // Two rounds of a binomial tree, also for a rank that sends nothing itself.
  communicator.broadcast(meta(5), /*root=*/1, "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kBroadcast].seconds, 2 * (1 + 20.0));
  communicator.barrier("a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kBarrier].seconds, 2);
  // The root takes in the three other slices, one after the other; the others wait for as long as the root gives.
  communicator.gather(meta(4), /*root=*/0, "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kGather].seconds, 3 * (1 + 4.0));
  communicator.scatter(meta(1), /*root=*/2, "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kScatter].seconds, 3 * (1 + 4.0));
  communicator.reduce(meta(1), ReduceOp::kSum, /*root=*/0, "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kReduce].seconds, 3 * (1 + 4.0));
  communicator.recv(meta(1), 3, "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kPair].seconds, 1 + 4.0);
}

TEST(SimulatedCommunicatorTest, TellsLinksWithinAHostFromThoseBetween) {
  SimulatedCommunicator communicator(slow_links(0, Topology::even(4, 2)));
  communicator.all_gather(meta(40), "a test").wait();
  const SimulatedCost& cost = communicator.figures()[Operation::kAllGather];
  // Its slice of 40 bytes to the other host, and two slices to its neighbour.
  EXPECT_EQ(cost.sent.between_hosts, (Traffic{40, 1}));
  EXPECT_EQ(cost.sent.within_host, (Traffic{80, 2}));
  EXPECT_DOUBLE_EQ(cost.seconds, (1 + 40.0) + (2 + 8.0));
  communicator.broadcast(meta(10), /*root=*/3, "a test").wait();
  EXPECT_DOUBLE_EQ(communicator.figures()[Operation::kBroadcast].seconds, (1 + 40.0) + (1 + 4.0));
}

TEST(SimulatedCommunicatorTest, TakesTheOtherRanksToHoldWhatThisOneHolds) {
  SimulatedCommunicator communicator({.rank = 1, .topology = Topology::even(4, 1)});
  const at::Tensor sum = at::full({8}, 3.0F);
  communicator.all_reduce(sum, ReduceOp::kSum, "a test").wait();
  EXPECT_TRUE(sum.eq(12).all().item<bool>());
  communicator.all_reduce(sum, ReduceOp::kMean, "a test").wait();
  communicator.all_reduce(sum, ReduceOp::kMax, "a test").wait();
  communicator.all_gather(sum, "a test").wait();
  communicator.broadcast(sum, 0, "a test").wait();
  EXPECT_TRUE(sum.eq(12).all().item<bool>());
  const at::Tensor at_root = at::ones({4});
  communicator.reduce(at_root, ReduceOp::kSum, /*root=*/0, "a test").wait();
  EXPECT_TRUE(at_root.eq(1).all().item<bool>());
  communicator.reduce(at_root, ReduceOp::kSum, /*root=*/1, "a test").wait();
  EXPECT_TRUE(at_root.eq(4).all().item<bool>());
  const at::Tensor received = at::zeros({4});
  communicator.all_to_all(at_root, received, "a test").wait();
  EXPECT_TRUE(torch::equal(received, torch::tensor({0.0F, 4.0F, 0.0F, 0.0F})));
  const at::Tensor whole = at::ones({8});
  communicator.reduce_scatter(whole, ReduceOp::kSum, "a test").wait();
  EXPECT_TRUE(torch::equal(whole, torch::tensor({1.0F, 1.0F, 4.0F, 4.0F, 1.0F, 1.0F, 1.0F, 1.0F})));
}

TEST(SimulatedCommunicatorTest, LosesARankWhereTheScriptSaysAndIsBrokenThen) {
  const memory::LedgerScope ledger(std::make_shared<memory::Ledger>("rank 0/8"));
  SimulatedCommunicator communicator(
      {.topology = Topology::even(8, 1),
       .failures = {{.operation = Operation::kAllReduce, .call = 1, .lost_rank = 5}}});
  communicator.all_gather(meta(8), "page \"a\"").wait();
  communicator.all_reduce(meta(10), ReduceOp::kSum, "page \"a\"").wait();
  const auto before = communicator.wire_traffic();
  const Pending lost = communicator.all_reduce(meta(256), ReduceOp::kSum, "page \"b\"");
  const std::string message = error_of([&] { lost.wait(); });
  EXPECT_THAT(message, HasSubstr("[rank 0/8] all_reduce #2 of page \"b\" (1.0 KiB): lost rank 5 "
                                 "(scripted); it has ended or was killed. See the last lines of "
                                 "rank 5"));
  EXPECT_EQ(error_of([&] { communicator.barrier("the end").wait(); }), message);
  EXPECT_EQ(communicator.wire_traffic(), before);
}

TEST(SimulatedCommunicatorTest, NumbersMessagesOfAPairApartFromCollectives) {
  SimulatedCommunicator communicator(
      {.topology = Topology::even(8, 1),
       .failures = {{.operation = Operation::kPair, .call = 2, .lost_rank = 5}}});
  communicator.barrier("a test").wait();
  communicator.send(meta(1), 5, "a test").wait();
  communicator.send(meta(1), 6, "a test").wait();
  const Pending lost = communicator.send(meta(1), 5, "a test");
  EXPECT_THAT(error_of([&] { lost.wait(); }), HasSubstr("send #1 to rank 5 of a test"));
}

TEST(SimulatedWorldTest, IsARankAmongOthersThatAgree) {
  const World world = World::simulated({.rank = 5, .topology = Topology::even(12, 4)});
  EXPECT_EQ(world.rank(), 5);
  EXPECT_EQ(world.size(), 12);
  EXPECT_EQ(world.local_rank(), 1);
  EXPECT_EQ(world.local_size(), 4);
  world.check_agreement("a test", {"a line"});
  EXPECT_EQ(world.gather_text("a test", "mine"), std::vector<std::string>(12, "mine"));
  world.communicator().barrier("a test").wait();
  EXPECT_EQ(SimulatedCommunicator::of(world.communicator()).figures()[Operation::kBarrier].calls,
            1);
}

TEST(SimulatedWorldTest, HasFiguresThatARealWorldHasNot) {
  testing::run_ranks(1, [](World& world) {
    EXPECT_THAT(error_of([&] { SimulatedCommunicator::of(world.communicator()); }),
                HasSubstr("got a solo one"));
  });
}

}  // namespace
}  // namespace zeropage::comm::simulated_communicator_test
