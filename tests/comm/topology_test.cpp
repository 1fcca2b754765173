#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zeropage/check.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::topology_test {
namespace {

using ::testing::ElementsAre;

TEST(TopologyTest, FillsHostsInRankOrderAndLeavesTheLastOneShort) {
  const Topology topology = Topology::even(/*ranks=*/7, /*ranks_per_host=*/3);
  EXPECT_EQ(topology.size(), 7);
  EXPECT_EQ(topology.hosts(), 3);
  EXPECT_THAT(topology.ranks_of(1), ElementsAre(3, 4, 5));
  EXPECT_THAT(topology.ranks_of(2), ElementsAre(6));
  EXPECT_EQ(topology.host_of(5), 1);
  EXPECT_EQ(topology.index_in_host(5), 2);
}

TEST(TopologyTest, NumbersHostsByTheirFirstRanksWhateverTheyAreCalled) {
  const Topology topology({9, 4, 9, 4, 4});
  EXPECT_EQ(topology.hosts(), 2);
  EXPECT_THAT(topology.ranks_of(0), ElementsAre(0, 2));
  EXPECT_THAT(topology.ranks_of(1), ElementsAre(1, 3, 4));
}

TEST(TopologyTest, LetsEveryRankStandForItselfAndARankOfASmallHostForSeveral) {
  const Topology topology({0, 0, 0, 1, 1});
  for (int rank = 0; rank < topology.size(); ++rank) {
    EXPECT_EQ(topology.counterpart(rank, topology.host_of(rank)), rank);
  }
  EXPECT_EQ(topology.counterpart(/*rank=*/0, /*host=*/1), 3);
  EXPECT_EQ(topology.counterpart(/*rank=*/1, /*host=*/1), 4);
  EXPECT_EQ(topology.counterpart(/*rank=*/2, /*host=*/1), 3);
  EXPECT_EQ(topology.counterpart(/*rank=*/4, /*host=*/0), 1);
}

TEST(TopologyTest, RefusesToHaveNoRanks) {
  EXPECT_THROW(Topology({}), c10::Error);
  EXPECT_THROW(Topology::even(0, 1), c10::Error);
  EXPECT_THROW(Topology::even(1, 0), c10::Error);
}

}  // namespace
}  // namespace zeropage::comm::topology_test
