#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "zeropage/communicator.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::traffic_test {
namespace {

using testing::run_ranks;

constexpr auto kFloat = c10::ScalarType::Float;
constexpr auto kBFloat16 = c10::ScalarType::BFloat16;

TrafficModel one_rank_a_host(int ranks) {
  return {Topology::even(ranks, 1), Transport::kAuto};
}

TrafficModel one_host(int ranks) {
  return {Topology::even(ranks, ranks), Transport::kAuto};
}

struct Arrangement {
  std::string name;
  Transport transport;
  std::vector<int> hosts;  // by rank
};

class CommunicatorTrafficTest : public ::testing::TestWithParam<Arrangement> {};

// From nothing over what is small to ragged slices of several segments.
TEST_P(CommunicatorTrafficTest, IsWhatTheModelSays) {
  const int size = static_cast<int>(GetParam().hosts.size());
  const TrafficModel model(Topology(GetParam().hosts), GetParam().transport);
  run_ranks(size,
            [&](World& world) {
              Communicator& communicator = world.communicator();
              const int rank = world.rank();
              WireTraffic expected;
              const auto expect = [](Traffic& sum, const LinkTraffic& sent) {
                sum.bytes += sent.total().bytes;
                sum.messages += sent.total().messages;
              };
              for (const auto dtype : {at::kFloat, at::kBFloat16}) {
                for (const int64_t numel : {0, 1, 5, 1000, 16'384, 16'385, 100'003, 700'001}) {
                  const at::Tensor tensor = at::zeros({numel}, dtype);
                  communicator.all_reduce(tensor, ReduceOp::kSum, "a test").wait();
                  expect(expected.all_reduce, model.all_reduce(rank, numel, dtype));
                  const int root = static_cast<int>(numel % size);
                  communicator.broadcast(tensor, root, "a test").wait();
                  expect(expected.broadcast, model.broadcast(rank, root, numel, dtype));
                  const at::Tensor whole = at::zeros({numel * size}, dtype);
                  communicator.reduce_scatter(whole, ReduceOp::kMean, "a test").wait();
                  expect(expected.reduce_scatter, model.reduce_scatter(rank, whole.numel(), dtype));
                  communicator.all_gather(whole, "a test").wait();
                  expect(expected.all_gather, model.all_gather(rank, whole.numel(), dtype));
                  communicator.reduce(tensor, ReduceOp::kSum, root, "a test").wait();
                  expect(expected.reduce, model.reduce(rank, root, numel, dtype));
                  const at::Tensor part = rank == root ? whole : tensor;
                  communicator.gather(part, root, "a test").wait();
                  expect(expected.gather, model.gather(rank, root, whole.numel(), dtype));
                  communicator.scatter(part, root, "a test").wait();
                  expect(expected.scatter, model.scatter(rank, root, whole.numel(), dtype));
                  const at::Tensor received = at::zeros_like(whole);
                  communicator.all_to_all(whole, received, "a test").wait();
                  expect(expected.all_to_all, model.all_to_all(rank, whole.numel(), dtype));
                  communicator.barrier("a test").wait();
                  expect(expected.barrier, model.barrier(rank));
                }
              }
              for (int receiver = 1; receiver < size; ++receiver) {
                const at::Tensor tensor = at::zeros({100});
                if (rank == 0) {
                  communicator.send(tensor, receiver, "a test").wait();
                  expect(expected.pair, model.send(0, receiver, 100, at::kFloat));
                } else if (rank == receiver) {
                  communicator.recv(tensor, 0, "a test").wait();
                }
              }
              EXPECT_EQ(communicator.wire_traffic(), expected) << "rank " << rank;
            },
            {.transport = GetParam().transport, .hosts = testing::host_labels(GetParam().hosts)});
}

std::vector<Arrangement> arrangements() {
  std::vector<Arrangement> all = {
      {"Halves4", Transport::kAuto, {0, 0, 1, 1}},
      {"Halves7", Transport::kAuto, {0, 0, 0, 1, 1, 1, 1}},
      {"ThreeAndOnes6", Transport::kAuto, {0, 0, 0, 1, 2, 3}},
      {"RoundRobin8", Transport::kAuto, {0, 1, 2, 0, 1, 2, 0, 1}},
      {"Mixed7", Transport::kAuto, {0, 1, 1, 0, 2, 0, 1}},
      {"GlooOnTwoHosts4", Transport::kGloo, {0, 0, 1, 1}},
  };
  for (const int size : {1, 2, 3, 4, 7, 8}) {
    all.push_back({c10::str("Gloo", size), Transport::kGloo, std::vector<int>(size)});
    all.push_back({c10::str("Shared", size), Transport::kShared, std::vector<int>(size)});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Worlds, CommunicatorTrafficTest, ::testing::ValuesIn(arrangements()),
                         [](const auto& info) { return info.param.name; });

TEST(TrafficTest, IsAllBetweenHostsWhereEachHoldsOneRank) {
  const TrafficModel model = one_rank_a_host(1024);
  const int64_t slice = 1 << 20;  // elements, eight segments
  const LinkTraffic gathered = model.all_gather(7, 1024 * slice, kFloat);
  EXPECT_EQ(gathered.within_host, Traffic());
  EXPECT_EQ(gathered.between_hosts, (Traffic{1023 * 4 * slice, 1023}));
  EXPECT_EQ(model.reduce_scatter(7, 1024 * slice, kFloat).between_hosts,
            (Traffic{1023 * 4 * slice, 1023 * 8}));
  EXPECT_EQ(model.broadcast(0, 0, 100, kFloat).between_hosts, (Traffic{10 * 400, 10}));
  EXPECT_EQ(model.broadcast(1023, 0, 100, kFloat).between_hosts, Traffic());
  EXPECT_EQ(model.barrier(3).between_hosts, (Traffic{0, 10}));
}

TEST(TrafficTest, IsSplitByHostsWhereGlooConnectsSeveralRanksOfAHost) {
  const TrafficModel model(Topology::even(6, 3), Transport::kGloo);
  EXPECT_EQ(model.algorithms(), TrafficModel::Algorithms::kMessages);
  const LinkTraffic gathered = model.all_gather(1, 600, kFloat);
  EXPECT_EQ(gathered.within_host, (Traffic{2 * 400, 2}));
  EXPECT_EQ(gathered.between_hosts, (Traffic{3 * 400, 3}));
}

TEST(TrafficTest, CountsAMessageAPeerInSharedMemory) {
  const TrafficModel model = one_host(4);
  const int64_t slice = 1 << 20;
  EXPECT_EQ(model.all_gather(1, 4 * slice, kFloat).within_host, (Traffic{3 * 4 * slice, 3}));
  EXPECT_EQ(model.reduce_scatter(1, 4 * slice, kFloat).within_host, (Traffic{3 * 4 * slice, 3}));
  EXPECT_EQ(model.all_reduce(1, 4 * slice, kFloat).within_host, (Traffic{6 * 4 * slice, 6}));
  EXPECT_EQ(model.all_reduce(1, 100, kFloat).within_host, (Traffic{3 * 400, 3}));
  EXPECT_EQ(model.broadcast(2, /*root=*/2, 100, kFloat).within_host, (Traffic{3 * 400, 3}));
  EXPECT_EQ(model.broadcast(0, /*root=*/2, 100, kFloat).total(), Traffic());
  EXPECT_EQ(model.barrier(0).total(), Traffic());
  // The last of seven slices of 20,000 elements has less than the others, as does what it reduces.
  const TrafficModel ragged = one_host(7);
  EXPECT_EQ(ragged.all_reduce(6, 20'000, kFloat).within_host,
            (Traffic{4 * (6 * 2858 + 6 * 2852), 12}));
}

class TwoLevelTrafficTest : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  const Topology topology{GetParam()};
  const TrafficModel model{topology, Transport::kAuto};
  int size() const { return topology.size(); }

  template <typename Sent>
  LinkTraffic over_all_ranks(Sent sent) const {
    LinkTraffic sum;
    for (int rank = 0; rank < size(); ++rank) sum += sent(rank);
    return sum;
  }
};

TEST_P(TwoLevelTrafficTest, BringsEverySliceToEveryOtherHostOnceAndThenToEveryRank) {
  const int64_t slice_bytes = 4 * 1000;
  const LinkTraffic sum =
      over_all_ranks([&](int rank) { return model.all_gather(rank, 1000 * size(), kFloat); });
  const int64_t crossings = size() * (topology.hosts() - 1);
  EXPECT_EQ(sum.between_hosts, (Traffic{crossings * slice_bytes, crossings}));
  // Each rank gets the N-1 slices of others, one of them between hosts for each it stands for.
  const int64_t within = size() * (size() - 1) - crossings;
  EXPECT_EQ(sum.within_host, (Traffic{within * slice_bytes, within}));
}

TEST_P(TwoLevelTrafficTest, SendsOnePartialSumAMaximalSubtreeBetweenHosts) {
  const LinkTraffic sum =
      over_all_ranks([&](int rank) { return model.reduce_scatter(rank, 1000 * size(), kFloat); });
  int64_t partials = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    const auto beside = static_cast<int64_t>(topology.ranks_of(host).size());
    const auto subtrees =
        static_cast<int64_t>(maximal_subtrees(topology.ranks_of(host), size()).size());
    partials += (size() - beside) * subtrees;
  }
  EXPECT_EQ(sum.between_hosts, (Traffic{partials * 4000, partials}));
}

TEST_P(TwoLevelTrafficTest, ReachesEveryRankWithABroadcastOnce) {
  for (int root = 0; root < size(); ++root) {
    const LinkTraffic sum =
        over_all_ranks([&](int rank) { return model.broadcast(rank, root, 10, kFloat); });
    EXPECT_EQ(sum.total(), (Traffic{40 * (size() - 1), size() - 1}));
    EXPECT_EQ(sum.between_hosts.messages, topology.hosts() - 1);
  }
}

TEST_P(TwoLevelTrafficTest, SendsSmallTensorsWholeToEveryRank) {
  for (int rank = 0; rank < size(); ++rank) {
    const auto beside = static_cast<int64_t>(topology.ranks_of(topology.host_of(rank)).size());
    const LinkTraffic sent = model.all_reduce(rank, 10, kFloat);
    EXPECT_EQ(sent.within_host, (Traffic{40 * (beside - 1), beside - 1}));
    EXPECT_EQ(sent.between_hosts, (Traffic{40 * (size() - beside), size() - beside}));
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, TwoLevelTrafficTest,
                         ::testing::Values(std::vector<int>{0, 0, 1, 1},
                                           std::vector<int>{0, 0, 0, 1, 1, 2, 2, 2},
                                           std::vector<int>{0, 1, 1, 0, 2, 0, 1},
                                           std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 2}));

TEST(TwoLevelTrafficTest, HoldsPartialSumsOfSeveralRanksInTheAccumulator) {
  // Ranks 0 to 2 and 3 to 5 of ((0 1)(2 3))(4 5): the hosts' subtrees are (0 1), 2 and 3, (4 5).
  const TrafficModel model(Topology::even(6, 3), Transport::kAuto);
  const int64_t slice = 1000;
  EXPECT_EQ(model.reduce_scatter(0, 6 * slice, kBFloat16).between_hosts,
            (Traffic{2 * slice + 4 * slice, 2}));
  EXPECT_EQ(model.reduce_scatter(0, 6 * slice, kFloat).between_hosts,
            (Traffic{4 * slice + 4 * slice, 2}));
  EXPECT_EQ(model.reduce_scatter(0, 6 * slice, kBFloat16).within_host, (Traffic{4 * 2 * slice, 4}));
}

TEST(TwoLevelTrafficTest, MeetsAtABarrierWithTheHostsFirstRanksOnly) {
  const TrafficModel model(Topology::even(12, 4), Transport::kAuto);
  EXPECT_EQ(model.barrier(4).between_hosts, (Traffic{0, 2}));
  EXPECT_EQ(model.barrier(5), LinkTraffic());
}

TEST(TrafficTest, RefusesSharedMemoryBetweenHosts) {
  EXPECT_THROW(TrafficModel(Topology::even(4, 2), Transport::kShared), c10::Error);
}

}  // namespace
}  // namespace zeropage::comm::traffic_test
