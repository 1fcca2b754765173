#include "device/topology.h"

#include <cstdlib>
#include <sched.h>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"

namespace zeropage::device::topology_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

std::vector<int> indices(const CoreSet& cores) {
  std::vector<int> found;
  for (const Core& core : cores) found.push_back(core.index);
  return found;
}

// Two nodes of four cores of two hardware threads.
Machine two_nodes() {
  return Machine("node:2 core:4 pu:2");
}

TEST(TopologyTest, ReadsCoresNodesAndHardwareThreads) {
  const Machine machine = two_nodes();
  EXPECT_EQ(machine.nodes().size(), 2U);
  ASSERT_EQ(machine.cores().size(), 8U);
  EXPECT_EQ(machine.cores()[5].node, 1);
  EXPECT_THAT(machine.cores()[5].cpus, ElementsAre(10, 11));
  EXPECT_THAT(indices(machine.cores_of(1)), ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(cpu_list(machine.cores_of(1)), "8-15");
}

TEST(TopologyTest, DividesAllCoresAmongRanksWithoutOverlap) {
  const Machine machine = two_nodes();
  for (const int ranks : {1, 2, 3, 4, 7, 8}) {
    const auto sets = machine.core_sets(ranks);
    ASSERT_EQ(sets.size(), static_cast<size_t>(ranks));
    std::vector<int> together;
    for (const CoreSet& set : sets) {
      const auto own = indices(set);
      EXPECT_GE(own.size(), 8U / static_cast<size_t>(ranks)) << ranks;
      EXPECT_LE(own.size(), (7U + static_cast<size_t>(ranks)) / static_cast<size_t>(ranks));
      together.insert(together.end(), own.begin(), own.end());
    }
    EXPECT_THAT(together, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7)) << ranks << " ranks";
  }
}

TEST(TopologyTest, GivesRanksOneCoreEachInTurnWhereThereAreTooFew) {
  const auto sets = Machine("node:1 core:3 pu:1").core_sets(7);
  for (size_t rank = 0; rank < 7; ++rank) {
    EXPECT_THAT(indices(sets[rank]), ElementsAre(static_cast<int>(rank % 3)));
  }
}

TEST(TopologyTest, PutsRanksNearTheirDevices) {
  const auto sets = two_nodes().core_sets(3, {1, 0, 1});
  EXPECT_THAT(indices(sets[0]), ElementsAre(4, 5));
  EXPECT_THAT(indices(sets[1]), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(indices(sets[2]), ElementsAre(6, 7));
  EXPECT_EQ(node_of(sets[0]), 1);
}

TEST(TopologyTest, DividesAllCoresWhereADevicesNodeIsNotKnown) {
  const Machine machine = two_nodes();
  EXPECT_EQ(machine.core_sets(2, {1, kUnknownNode}), machine.core_sets(2));
  EXPECT_EQ(machine.core_sets(2, {1, 9}), machine.core_sets(2));
}

TEST(TopologyTest, RefusesWhatMakesNoSense) {
  const Machine machine = two_nodes();
  EXPECT_THAT(error_of([&] { (void)machine.core_sets(0); }),
              HasSubstr("expected 1 or more, got 0"));
  EXPECT_THAT(error_of([&] {
                (void)machine.core_sets(3, {0, 1});
              }),
              HasSubstr("expected one of each of 3 ranks or none at all, got 2"));
  EXPECT_THAT(error_of([] { (void)node_of({}); }), HasSubstr("a set of zero cores"));
  EXPECT_THAT(error_of([] { Machine("core:many"); }), HasSubstr("got \"core:many\""));
}

TEST(TopologyTest, FindsTheCoresOfThisProcess) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::set<int> cpus;
  for (const Core& core : Machine::here().cores()) {
    for (const int cpu : core.cpus) {
      EXPECT_TRUE(CPU_ISSET(cpu, &allowed)) << cpu;
      EXPECT_TRUE(cpus.insert(cpu).second) << cpu << " is in two cores";
    }
  }
  EXPECT_EQ(static_cast<int>(cpus.size()), CPU_COUNT(&allowed));
  EXPECT_FALSE(Machine::here().nodes().empty());
  EXPECT_EQ(Machine::here().node_of_pci("ffff:ff:1f.7"), kUnknownNode);
}

TEST(TopologyTest, TakesItsPartFromTheLaunchersVariables) {
  EXPECT_EQ(own_core_set(), Machine::here().cores());
  ::setenv("LOCAL_RANK", "1", 1);
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  EXPECT_EQ(own_core_set(), Machine::here().core_sets(2)[1]);
  ::setenv("LOCAL_RANK", "2", 1);
  EXPECT_THAT(error_of([] { own_core_set(); }), HasSubstr("local rank 2 of 2 is impossible"));
  ::setenv("LOCAL_RANK", "1x", 1);
  EXPECT_THAT(error_of([] { own_core_set(); }), HasSubstr("LOCAL_RANK: expected a number"));
  ::unsetenv("LOCAL_RANK");
  ::unsetenv("LOCAL_WORLD_SIZE");
}

TEST(TopologyTest, BindsAThreadForAsLongAsTheScopeLives) {
  const auto mask = [] {
    cpu_set_t cpus;
    EXPECT_EQ(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
    return cpus;
  };
  const cpu_set_t before = mask();
  for (const Core& core : Machine::here().cores()) {
    const BindingScope bound({core});
    const cpu_set_t within = mask();
    EXPECT_EQ(CPU_COUNT(&within), static_cast<int>(core.cpus.size()));
    EXPECT_TRUE(CPU_ISSET(core.cpus.front(), &within));
    EXPECT_TRUE(CPU_ISSET(sched_getcpu(), &within));
    cpu_set_t elsewhere;
    std::thread([&] {
      const BindingScope other({Machine::here().cores().back()});
      elsewhere = mask();
    }).join();
    EXPECT_TRUE(CPU_ISSET(Machine::here().cores().back().cpus.front(), &elsewhere));
  }
  const cpu_set_t after = mask();
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
  EXPECT_THAT(error_of([] { BindingScope(CoreSet{{.cpus = {100000}}}); }),
              HasSubstr("does not bind a thread to the hardware threads \"100000\""));
}

}  // namespace
}  // namespace zeropage::device::topology_test
