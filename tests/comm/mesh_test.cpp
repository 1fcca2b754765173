// Worlds of some of a world's ranks, and grids of them.
#include "zeropage/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/contributions.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::mesh_test {
namespace {

using ::testing::AllOf;
using testing::contribution;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using ::testing::StartsWith;
using testing::try_ranks;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Arrangement {
  std::string name;
  Transport transport = Transport::kAuto;
  std::vector<int> hosts;  // of eight ranks

  testing::RankOptions options() const {
    return {.transport = transport, .hosts = testing::host_labels(hosts)};
  }
};

const std::vector<Arrangement> kArrangements = {
    {"Shared", Transport::kShared, {}},
    {"Gloo", Transport::kGloo, {}},
    {"TwoHosts", Transport::kAuto, {0, 0, 0, 0, 1, 1, 1, 1}},
    {"RoundRobin", Transport::kAuto, {0, 1, 0, 1, 0, 1, 0, 1}}};

class MeshTest : public ::testing::TestWithParam<Arrangement> {};
INSTANTIATE_TEST_SUITE_P(Hosts, MeshTest, ::testing::ValuesIn(kArrangements),
                         [](const auto& info) { return info.param.name; });

// The tree over ranks in the order of a world.
torch::Tensor sum_of(const std::vector<int>& ranks, int64_t numel) {
  if (ranks.size() == 1) return contribution(ranks.front(), numel);
  size_t half = 1;
  while (half * 2 < ranks.size()) half *= 2;
  const auto middle = ranks.begin() + static_cast<std::ptrdiff_t>(half);
  return sum_of({ranks.begin(), middle}, numel) + sum_of({middle, ranks.end()}, numel);
}

// Every collective of a world whose ranks have these numbers elsewhere.
void expect_collectives_of(const World& part, const std::vector<int>& ranks, int own) {
  ASSERT_EQ(part.size(), static_cast<int>(ranks.size()));
  ASSERT_EQ(ranks[static_cast<size_t>(part.rank())], own);
  Communicator& communicator = part.communicator();
  for (const int64_t numel : {5, 100'003}) {
    const auto sum = sum_of(ranks, numel);
    const auto reduced = contribution(own, numel);
    communicator.all_reduce(reduced, ReduceOp::kSum, "a test").wait();
    EXPECT_TRUE(torch::equal(reduced, sum)) << numel;
    const int root = part.size() - 1;
    const auto given = contribution(own, numel);
    communicator.broadcast(given, root, "a test").wait();
    EXPECT_TRUE(torch::equal(given, contribution(ranks.back(), numel))) << numel;
  }
  const int64_t slice = 1001;
  const auto whole = contribution(own, slice * part.size());
  communicator.reduce_scatter(whole, ReduceOp::kSum, "a test").wait();
  communicator.all_gather(whole, "a test").wait();
  EXPECT_TRUE(torch::equal(whole, sum_of(ranks, slice * part.size())));
  communicator.barrier("a test").wait();
  if (part.size() > 1) {
    const auto message = torch::full({10}, own);
    if (part.rank() == 0) communicator.send(message, 1, "a test").wait();
    if (part.rank() == 1) {
      communicator.recv(message, 0, "a test").wait();
      EXPECT_TRUE(message.eq(ranks.front()).all().item<bool>());
    }
  }
  std::vector<std::string> expected;
  for (const int rank : ranks) expected.push_back(std::to_string(rank));
  EXPECT_EQ(part.gather_text("a test", std::to_string(own)), expected);
  EXPECT_EQ(
      part.settle("a test", std::to_string(own), [](const auto& texts) { return texts.back(); }),
      expected.back());
}

// ---- split ----

TEST_P(MeshTest, RanksOfAColourAreAWorldInTheOrderOfTheirKeys) {
  run_ranks(
      8,
      [](World& world) {
        const bool is_odd = world.rank() % 2 == 1;
        // Odd ranks backwards, the even ones but rank 0 with equal keys.
        const World part = world.split(is_odd, is_odd ? -world.rank() : world.rank() > 0);
        const std::vector<int> ranks =
            is_odd ? std::vector<int>{7, 5, 3, 1} : std::vector<int>{0, 2, 4, 6};
        expect_collectives_of(part, ranks, world.rank());
        EXPECT_EQ(part.global_rank(0), ranks.front());
      },
      GetParam().options());
}

TEST_P(MeshTest, ASplitOfASplitIsAWorld) {
  run_ranks(
      8,
      [](World& world) {
        const World halves = world.split(world.rank() / 4, -world.rank());
        const World pairs = halves.split(halves.rank() / 2, 0);
        const int first = world.rank() / 2 * 2;
        expect_collectives_of(pairs, {first + 1, first}, world.rank());
        EXPECT_EQ(pairs.global_rank(1), first);
      },
      GetParam().options());
}

TEST(SplitTest, PartsOfUnequalSizesAndOfOneRankWork) {
  run_ranks(5, [](World& world) {
    const World part = world.split(world.rank() < 4 ? 1 : 9, 0);
    const bool is_alone = world.rank() == 4;
    EXPECT_EQ(part.communicator().transport(), is_alone ? "solo" : "shared");
    expect_collectives_of(part, is_alone ? std::vector<int>{4} : std::vector<int>{0, 1, 2, 3},
                          world.rank());
  });
}

TEST(SplitTest, AWorldOfOneSplitsIntoItself) {
  run_ranks(1, [](World& world) { expect_collectives_of(world.split(3, 0), {0}, 0); });
}

TEST(SplitTest, AWorldOutlivesWhatItWasSplitFrom) {
  run_ranks(2, [](World& world) {
    std::optional<World> half = world.split(0, 0);
    const World same = half->split(0, 0);
    half.reset();
    expect_collectives_of(same, {0, 1}, world.rank());
  });
}

// Stands for the gather for a next pass, which nobody waits for when a model goes. Where one rank goes before its operation has begun and
// another is in it already, nobody is lost.
TEST_P(MeshTest, APartMayGoWhileItsOperationsAreUnderWay) {
  run_ranks(
      8,
      [](World& world) {
        for (int round = 0; round < 20; ++round) {
          const World part = world.split(world.rank() / 4, 0);
          for (int operation = 0; operation < 3; ++operation) {
            static_cast<void>(part.communicator().all_gather(
                torch::zeros({part.size() * int64_t{1000}}), "what nobody waits for"));
          }
        }
        EXPECT_EQ(world.sum(1.0), 8);
      },
      GetParam().options());
}

// A pipeline that is made anew after an error leaves such a recv behind.
TEST(SplitTest, WhatWaitsForARankThatLetAPartGoEndsAndTheWorldGoesOn) {
  run_ranks(2, [](World& world) {
    std::optional<World> part = world.split(0, 0);
    if (world.rank() == 1) {
      part.reset();
    } else {
      EXPECT_THAT(testing::error_of([&] {
                    part->communicator().recv(torch::zeros({4}), 1, "what never comes").wait();
                  }),
                  AllOf(HasSubstr("recv #0 from rank 1 of what never comes within colour 0"),
                        HasSubstr("lost rank 1: it let its world go")));
    }
    EXPECT_EQ(world.sum(1.0), 2);
    std::optional<World> another = world.split(0, 0);
    Pending in_vain;
    if (world.rank() == 0) {
      in_vain = another->communicator().recv(torch::zeros({4}), 1, "what never comes");
    }
    another.reset();
    EXPECT_EQ(world.sum(1.0), 2);
  });
}

TEST(SplitTest, PartsUseWhatDecoratesTheWorldsCommunicator) {
  std::atomic<int> decorated{0};
  run_ranks(2, [](World& world) { static_cast<void>(world.split(0, 0)); },
            {.decorate = [&](auto inner) {
              ++decorated;
              return inner;
            }});
  EXPECT_EQ(decorated, 4);
}

TEST(SplitTest, ARankThatDoesSomethingElseIsNamed) {
  const auto errors = try_ranks(2,
                                [](World& world) {
                                  if (world.rank() == 0) {
                                    static_cast<void>(world.split(0, 0));
                                  } else {
                                    world.gather_text("the weather", "rain");
                                  }
                                },
                                {.deadline = 2s});
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("World::split: rank 1 does something else, and wrote \"rain\""));
}

// ---- mesh ----

TEST_P(MeshTest, TheRanksOfAnAxisDifferInTheirPlaceOnItAlone) {
  run_ranks(
      8,
      [](World& world) {
        const Mesh mesh(world, {{"pipeline", 2}, {"data", 2}, {"tensor", 2}});
        const int rank = world.rank();
        expect_collectives_of(mesh["pipeline"], {rank % 4, rank % 4 + 4}, rank);
        const int data = rank / 4 * 4 + rank % 2;
        expect_collectives_of(mesh["data"], {data, data + 2}, rank);
        const int tensor = rank / 2 * 2;
        expect_collectives_of(mesh["tensor"], {tensor, tensor + 1}, rank);
        EXPECT_TRUE(mesh.has("data") && !mesh.has("dates"));
      },
      GetParam().options());
}

TEST(MeshTransportTest, AxesWithinHostsUseSharedMemory) {
  run_ranks(8,
            [](World& world) {
              const Mesh mesh(world, {{"pipeline", 2}, {"data", 2}, {"tensor", 2}});
              EXPECT_EQ(mesh["pipeline"].communicator().transport(), "gloo");
              EXPECT_EQ(mesh["data"].communicator().transport(), "shared");
              EXPECT_EQ(mesh["tensor"].communicator().transport(), "shared");
              EXPECT_EQ(mesh["data"].local_size(), 2);
              const Mesh wide(world, {{"data", 4}, {"tensor", 2}});
              EXPECT_EQ(wide["data"].communicator().transport(), "two-level");
              EXPECT_EQ(wide["data"].local_rank(), world.rank() / 2 % 2);
            },
            {.hosts = testing::host_labels({0, 0, 0, 0, 1, 1, 1, 1})});
}

TEST(MeshTransportTest, AnAxisAsLongAsTheWorldIsTheWorldAndOneOfOneRankIsAlone) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"tensor", 1}});
    EXPECT_EQ(&mesh["data"].communicator(), &world.communicator());
    EXPECT_EQ(mesh["tensor"].communicator().transport(), "solo");
  });
}

TEST(MeshTransportTest, OperationsOfAxesOverlap) {
  run_ranks(4, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
    const auto gradient = torch::full({100'000}, 1.0 + world.rank());
    const auto activation = torch::full({100}, 1.0 + world.rank());
    Pending late = mesh["data"].communicator().all_reduce(gradient, ReduceOp::kSum, "a gradient");
    for (int step = 0; step < 3; ++step) {
      mesh["tensor"].communicator().all_reduce(activation, ReduceOp::kMax, "an activation").wait();
    }
    late.wait();
    EXPECT_EQ(gradient[0].item<double>(), 2.0 * (1 + world.rank() % 2) + 2);
    EXPECT_EQ(activation[0].item<double>(), world.rank() / 2 * 2 + 2);
  });
}

TEST(MeshTrafficTest, IsCountedByAxis) {
  run_ranks(4, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
    const WireTraffic before = world.communicator().wire_traffic();
    const auto tensor = torch::zeros({1000});
    mesh["data"].communicator().all_reduce(tensor, ReduceOp::kSum, "a test").wait();
    EXPECT_EQ(mesh["data"].communicator().wire_traffic().all_reduce, (Traffic{4000, 1}));
    EXPECT_EQ(mesh["tensor"].communicator().wire_traffic(), WireTraffic());
    EXPECT_EQ(world.communicator().wire_traffic(), before);
  });
}

TEST(SimulatedMeshTest, AxesCountWithTheirOwnRanksAndHosts) {
  const World world = World::simulated({.rank = 13, .topology = Topology::even(16, 8)});
  const Mesh mesh(world, {{"pipeline", 2}, {"data", 4}, {"tensor", 2}});
  EXPECT_EQ(mesh["pipeline"].rank(), 1);
  EXPECT_EQ(mesh["data"].rank(), 2);
  EXPECT_EQ(mesh["tensor"].rank(), 1);
  EXPECT_EQ(mesh["data"].local_size(), 4);
  EXPECT_EQ(mesh["data"].global_rank(0), 9);
  mesh["data"].communicator().all_gather(torch::zeros({400}), "a test").wait();
  mesh["pipeline"].communicator().all_gather(torch::zeros({400}), "a test").wait();
  const auto sent = [&](const char* axis) {
    return SimulatedCommunicator::of(mesh[axis].communicator())
        .figures()[Operation::kAllGather]
        .sent;
  };
  EXPECT_EQ(sent("data"), (LinkTraffic{.within_host = {3 * 400, 3}, .between_hosts = {}}));
  EXPECT_EQ(sent("pipeline"), (LinkTraffic{.within_host = {}, .between_hosts = {800, 1}}));
  EXPECT_EQ(sent("tensor"), LinkTraffic());
}

// ---- what is refused ----

std::string refusal_of(std::vector<MeshAxis> axes) {
  std::string refusal;
  const auto errors = try_ranks(4, [&](World& world) { Mesh(world, axes); });
  for (int rank = 0; rank < 4; ++rank) {
    const std::string message = message_of(errors[static_cast<size_t>(rank)]);
    const std::string prefix = c10::str("[rank ", rank, "/4] ");
    EXPECT_THAT(message, StartsWith(prefix));
    if (rank > 0) {
      EXPECT_EQ(message.substr(std::min(prefix.size(), message.size())), refusal);
    }
    refusal = message.substr(std::min(prefix.size(), message.size()));
  }
  return refusal;
}

TEST(MeshRefusalTest, AxesThatAreNoGridOfTheWorldAreRefusedOnAllRanks) {
  EXPECT_THAT(refusal_of({{"data", 3}, {"tensor", 2}}),
              StartsWith("Mesh: the axes \"data\" 3, \"tensor\" 2 need more than 4 ranks, but the "
                         "world has 4; make their sizes multiply to it"));
  EXPECT_THAT(refusal_of({{"data", 2}}), HasSubstr("need 2 ranks, but the world has 4"));
  EXPECT_THAT(refusal_of({}), StartsWith("Mesh: expected an axis or more, got none"));
  EXPECT_THAT(refusal_of({{"data", 0}, {"tensor", 4}}),
              StartsWith("Mesh: axis \"data\": expected 1 rank or more, got 0"));
  EXPECT_THAT(refusal_of({{"data", -4}, {"tensor", -1}}), HasSubstr("got -4"));
  EXPECT_THAT(refusal_of({{"data", 1 << 30}, {"tensor", 1 << 30}}), HasSubstr("more than 4"));
  EXPECT_THAT(refusal_of({{"data", 2}, {"data", 2}}),
              StartsWith("Mesh: the axis name \"data\" is there twice"));
  EXPECT_THAT(refusal_of({{"", 4}}), StartsWith("Mesh: axis 0 has no name"));
}

TEST(MeshTest, SamplesAreOfTheRanksAlongDataAndContext) {
  run_ranks(8, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}, {"context", 2}});
    const World& samples = mesh.samples();
    ASSERT_EQ(samples.size(), 4);
    EXPECT_EQ(samples.rank(), 2 * mesh["data"].rank() + mesh["context"].rank());
    EXPECT_EQ(samples.sum(1 << world.rank()), mesh["tensor"].rank() == 0 ? 0x33 : 0xCC);
    const Mesh flat(world, {{"data", 8}});
    EXPECT_EQ(&flat.samples().communicator(), &world.communicator());
    const Mesh alone(world, {{"context", 4}, {"tensor", 2}});
    EXPECT_EQ(alone.samples().size(), 4);
    const Mesh one(world, {{"data", 4}, {"context", 1}, {"tensor", 2}});
    EXPECT_EQ(&one.samples().communicator(), &one["data"].communicator());
    const Mesh none(world, {{"tensor", 8}});
    EXPECT_ANY_THROW(none.samples());
  });
}

TEST(MeshRefusalTest, AxesThatDifferBetweenRanksAreToldOnAllRanks) {
  const auto errors = try_ranks(2, [](World& world) {
    Mesh(world, world.rank() == 0 ? std::vector<MeshAxis>{{"data", 2}}
                                  : std::vector<MeshAxis>{{"tensor", 2}});
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error),
                HasSubstr("rank 0 has axes: \"data\" 2; rank 1 has axes: \"tensor\" 2"));
  }
}

TEST(MeshRefusalTest, AnAxisThatThereIsNotIsToldWithThoseThatThereAre) {
  const auto errors = try_ranks(2, [](World& world) {
    const Mesh mesh(world, {{"data", 2}});
    static_cast<void>(mesh["date"]);
  });
  EXPECT_THAT(message_of(errors[0]), HasSubstr("Mesh: there is no axis \"date\" among \"data\" 2"));
}

TEST(MeshRefusalTest, DisagreementsOnAnAxisAreToldInNumbersOfTheWorld) {
  const auto errors = try_ranks(4, [](World& world) {
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
    mesh["data"].check_agreement("the model", {c10::str("layers: ", world.rank() / 3)});
  });
  EXPECT_THAT(message_of(errors[1]), HasSubstr("rank 1 has layers: 0; rank 3 has layers: 1"));
}

// ---- ranks that fail ----

struct Failure {
  std::vector<std::string> messages;  // by rank
  std::chrono::milliseconds took{};   // until the last had thrown
};

Failure failure_of(const testing::RankOptions& options,
                   const std::function<void(World&, const Mesh&)>& calls) {
  std::atomic<int64_t> latest_ms = 0;
  const auto errors = try_ranks(
      4,
      [&](World& world) {
        const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
        world.communicator().barrier("the start").wait();
        const auto start = Clock::now();
        try {
          calls(world, mesh);
        } catch (...) {
          const auto took = Clock::now() - start;
          latest_ms = std::max<int64_t>(latest_ms, took / 1ms);
          throw;
        }
      },
      options);
  Failure failure{.messages = {}, .took = std::chrono::milliseconds(latest_ms)};
  for (const auto& error : errors) failure.messages.push_back(message_of(error));
  return failure;
}

void reduce(const World& world, const char* what) {
  world.communicator().all_reduce(torch::zeros({100'000}), ReduceOp::kSum, what).wait();
}

class LostRankTest : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  testing::RankOptions options() const {
    const std::string& way = std::get<0>(GetParam());
    if (way == "Gloo") return {.transport = Transport::kGloo};
    if (way == "Shared") return {.transport = Transport::kShared};
    return {.hosts = testing::host_labels({0, 0, 1, 1})};
  }
  int victim() const { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Ways, LostRankTest,
                         ::testing::Combine(::testing::Values("Gloo", "Shared", "TwoHosts"),
                                            ::testing::Values(0, 3)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
                         });

// The victim's neighbours on either axis wait for it; the rank across waits for one of them.
TEST_P(LostRankTest, EndsAllAxesWithItsNumberInTheWorld) {
  const Failure failure = failure_of(options(), [&](World& world, const Mesh& mesh) {
    if (world.rank() == victim()) throw std::runtime_error("gone");
    const bool is_across = world.rank() == 3 - victim();
    const bool shares_tensor = world.rank() / 2 == victim() / 2;
    reduce(is_across || shares_tensor ? mesh["tensor"] : mesh["data"], "a page");
  });
  EXPECT_LT(failure.took, 3s);
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim()) continue;
    EXPECT_THAT(failure.messages[static_cast<size_t>(rank)],
                AllOf(StartsWith(c10::str("[rank ", rank, "/4] all_reduce #0 of a page along \"")),
                      HasSubstr(c10::str("(390.6 KiB): lost rank ", victim()))));
  }
}

TEST_P(LostRankTest, IsTheCauseOfWhatARankThatFailedOfItCallsLaterOnOtherAxes) {
  const Failure failure = failure_of(options(), [&](World& world, const Mesh& mesh) {
    if (world.rank() == victim()) throw std::runtime_error("gone");
    if (world.rank() / 2 == victim() / 2) {
      EXPECT_THROW(reduce(mesh["tensor"], "a page"), c10::Error);
    }
    reduce(mesh["data"], "another page");
  });
  const int beside = victim() ^ 1;
  EXPECT_THAT(failure.messages[static_cast<size_t>(beside)],
              AllOf(StartsWith(c10::str("[rank ", beside,
                                        "/4] all_reduce #0 of another page along \"data\" (390.6 "
                                        "KiB): lost rank ",
                                        victim())),
                    HasSubstr(". This rank had failed of it in all_reduce #0 of a page along "
                              "\"tensor\"")));
  EXPECT_THAT(failure.messages[static_cast<size_t>(3 - victim())],
              AllOf(HasSubstr(c10::str("lost rank ", victim())),
                    HasSubstr(c10::str(". Rank ", beside, " had failed of it in"))));
}

TEST_P(LostRankTest, InTextsEndsAllAxesToo) {
  const Failure failure = failure_of(options(), [&](World& world, const Mesh& mesh) {
    if (world.rank() == victim()) throw std::runtime_error("gone");
    if (world.rank() / 2 == victim() / 2) mesh["tensor"].gather_text("the layers", "");
    mesh["data"].gather_text("the pages", "");
  });
  EXPECT_LT(failure.took, 4s);
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim()) continue;
    EXPECT_THAT(failure.messages[static_cast<size_t>(rank)],
                AllOf(HasSubstr(" along \""), HasSubstr(c10::str("lost rank ", victim()))))
        << rank;
  }
}

class WaitingRankTest : public ::testing::TestWithParam<Transport> {
 protected:
  testing::RankOptions quick() const { return {.deadline = 1s, .transport = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Transports, WaitingRankTest,
                         ::testing::Values(Transport::kGloo, Transport::kShared),
                         [](const auto& info) { return name(info.param); });

// Rank 0 waits for rank 2, which waits for rank 3.
TEST_P(WaitingRankTest, IsNotTakenForLateWhileARankOfAnotherAxisIsBusy) {
  const Failure failure = failure_of(quick(), [&](World& world, const Mesh& mesh) {
    if (world.rank() == 3) std::this_thread::sleep_for(2500ms);
    reduce(mesh["tensor"], "a page");
    reduce(mesh["data"], "another page");
  });
  EXPECT_THAT(failure.messages, ::testing::Each(""));
}

// Each pair that calls the same axis next has one that is still on the other.
TEST_P(WaitingRankTest, EndsAtTheDeadlineWhereAxesWaitForEachOther) {
  const Failure failure = failure_of(quick(), [&](World& world, const Mesh& mesh) {
    const bool is_diagonal = world.rank() == 0 || world.rank() == 3;
    reduce(mesh[is_diagonal ? "tensor" : "data"], "a page");
  });
  EXPECT_LT(failure.took, 4s) << "the busy limit is 60 s";
  EXPECT_THAT(failure.messages[0],
              AllOf(StartsWith("[rank 0/4] all_reduce #0 of a page along \"tensor\" (390.6 KiB): "),
                    HasSubstr(" did not answer within 1 s"),
                    HasSubstr(" stands at all_reduce #0 of a page along \"data\" (390.6 KiB)")));
}

TEST_P(WaitingRankTest, IsToldWhoOfAnAxisIsOutOfStep) {
  const Failure failure = failure_of(quick(), [&](World& world, const Mesh& mesh) {
    if (world.rank() == 3) {
      mesh["data"].communicator().barrier("the end").wait();
    } else {
      reduce(mesh["data"], "a page");
    }
  });
  EXPECT_THAT(failure.messages[1],
              AllOf(HasSubstr("all_reduce #0 of a page along \"data\" (390.6 KiB): rank 3 is out "
                              "of step: it waits in barrier #0 of the end along \"data\""),
                    Not(HasSubstr("rank 1 is out"))));
}

TEST_P(WaitingRankTest, IsToldWhomAMessageWasFor) {
  const Failure failure = failure_of(quick(), [&](World& world, const Mesh& mesh) {
    if (world.rank() == 3) throw std::runtime_error("gone");
    if (world.rank() == 1) {
      mesh["data"].communicator().send(torch::zeros({1000}), 1, "a batch").wait();
      mesh["data"].communicator().send(torch::zeros({1000}), 1, "a batch").wait();
      mesh["data"].communicator().recv(torch::zeros({1000}), 1, "a batch").wait();
    }
  });
  EXPECT_THAT(failure.messages[1], AllOf(HasSubstr(" rank 3 of a batch along \"data\" (3.9 KiB): "),
                                         HasSubstr("lost rank 3")));
}

}  // namespace
}  // namespace zeropage::comm::mesh_test
