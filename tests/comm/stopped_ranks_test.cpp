// Ranks whose processes show no life, as when they are stopped or their host is cut off, and local ranks'
// ports. Forks.
#include <filesystem>
#include <set>
#include <signal.h>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/launched_process.h"
#include "tests/harness/listening_sockets.h"
#include "zeropage/check.h"
#include "zeropage/mesh.h"
#include "zeropage/world.h"

namespace zeropage::comm::stopped_ranks_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

int printing_errors(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", memory::message_of(error).c_str());
    return 1;
  }
  return 0;
}

// The ranks in `stopped` stop in the middle of their work; the others go on calling.
void reduce_until_stopped(World& world, const std::vector<int>& stopped) {
  at::set_num_threads(1);
  for (int step = 0; step < 4; ++step) {
    const bool stops = std::find(stopped.begin(), stopped.end(), world.rank()) != stopped.end();
    if (step == 3 && stops) ::raise(SIGSTOP);
    world.communicator().all_reduce(at::zeros({100'000}), ReduceOp::kSum, "a page").wait();
  }
}

class StoppedRankTest : public ::testing::TestWithParam<std::tuple<int, Transport>> {};

TEST_P(StoppedRankTest, IsNamedAtTheDeadlineHoweverLongABusyOneWouldBeWaitedFor) {
  const auto [victim, transport] = GetParam();
  LaunchedProcess launched([victim = victim, transport = transport] {
    return World::launch(3,
                         [=](World& world) {
                           return printing_errors([&] { reduce_until_stopped(world, {victim}); });
                         },
                         {.deadline = 4s, .transport = transport}, {.grace = 3s});
  });
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_LT(launched.seconds(), 20.0);
  const std::string errors = launched.err();
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    EXPECT_THAT(errors, ContainsRegex(c10::str("\\[rank ", rank, "\\] error: .rank ", rank,
                                               "/3. all_reduce #3 of a page [^:]*: rank ", victim,
                                               " did not answer within 4 s")));
  }
  if (transport == Transport::kShared) {
    EXPECT_THAT(errors, HasSubstr("is stopped (SIGSTOP"));
  }
}

INSTANTIATE_TEST_SUITE_P(Victims, StoppedRankTest,
                         ::testing::Combine(::testing::Values(0, 1),
                                            ::testing::Values(Transport::kGloo,
                                                              Transport::kShared)));

// A rank that does not share an axis with the killed one waits for a rank that does.
class KilledMeshRankTest : public ::testing::TestWithParam<std::tuple<int, Transport>> {};

TEST_P(KilledMeshRankTest, IsNamedOnAllAxes) {
  const auto [victim, transport] = GetParam();
  LaunchedProcess launched([victim = victim, transport = transport] {
    return World::launch(4,
                         [=](World& world) {
                           return printing_errors([&] {
                             at::set_num_threads(1);
                             const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
                             world.communicator().barrier("the start").wait();
                             if (world.rank() == victim) ::raise(SIGKILL);
                             const bool is_beside =
                                 world.rank() == 3 - victim || world.rank() / 2 == victim / 2;
                             mesh[is_beside ? "tensor" : "data"]
                                 .communicator()
                                 .all_reduce(at::zeros({100'000}), ReduceOp::kSum, "a page")
                                 .wait();
                           });
                         },
                         {.transport = transport}, {.grace = 5s});
  });
  EXPECT_NE(launched.wait(), 0);
  EXPECT_LT(launched.seconds(), 12.0);
  const std::string errors = launched.err();
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim) continue;
    EXPECT_THAT(errors, ContainsRegex(c10::str(
                            "\\[rank ", rank, "\\] error: .rank ", rank,
                            "/4. all_reduce #0 of a page along [^:]*: lost rank ", victim)));
  }
}

// Rank 0 serves the store.
INSTANTIATE_TEST_SUITE_P(Victims, KilledMeshRankTest,
                         ::testing::Combine(::testing::Values(0, 3),
                                            ::testing::Values(Transport::kGloo,
                                                              Transport::kShared)));

// Ranks of this host that take each other for ranks of two; rank % 2 is the host. A host whose ranks are
// all stopped is to the others as one that is cut off: nothing comes, and no connection ends.
class PartitionTest : public ::testing::TestWithParam<int> {};

TEST_P(PartitionTest, EveryErrorBeginsWithTheRanksOfTheLostHost) {
  const int lost_host = GetParam();
  constexpr int kRanks = 4;
  LaunchOptions launch{.grace = 4s};
  launch.ranks = kRanks;
  LaunchedProcess launched([=] {
    return launch_function(
        [lost_host] {
          return printing_errors([&] {
            // For meeting too, in which each lost answer of the name service costs a second.
            const WorldOptions options{.deadline = 5s};
            Place place = read_place();
            place.host = c10::str("host ", place.rank % 2);
            World world(place, open_store(place, options.deadline), options);
            reduce_until_stopped(world, {lost_host, lost_host + 2});
          });
        },
        launch);
  });
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_LT(launched.seconds(), 20.0);
  const std::string errors = launched.err();
  for (int rank = 1 - lost_host; rank < kRanks; rank += 2) {
    EXPECT_THAT(errors,
                ContainsRegex(c10::str("\\[rank ", rank, "\\] error: (.rank ", rank,
                                       "/4. )?all_reduce #3 of a page [^:]*: ranks ", lost_host,
                                       ", ", lost_host + 2, " did not answer within 5 s")));
  }
}

// Rank 0 serves the store, which is then cut off too.
INSTANTIATE_TEST_SUITE_P(Hosts, PartitionTest, ::testing::Values(0, 1));

// ---- what local ranks listen at ----

// The addresses of the sockets of this process that listen.
std::set<std::string> addresses_listened_at() {
  std::set<std::string> own_sockets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry, gone).string();
    if (target.starts_with("socket:[")) own_sockets.insert(target.substr(8, target.size() - 9));
  }
  std::set<std::string> addresses;
  for (const auto& socket : zeropage::testing::listening_sockets()) {
    if (own_sockets.contains(socket.inode)) addresses.insert(socket.address);
  }
  return addresses;
}

// Rank 1 has given its text and dies before there is an answer, as in a save. Rank 0 would wait five seconds for it to read.
TEST(LostReaderTest, IsNotWaitedForBeforeTheAnswerGoesOn) {
  LaunchedProcess launched([] {
    return World::launch(2, [](World& world) {
      if (world.rank() == 1) {
        std::thread([] {
          std::this_thread::sleep_for(300ms);
          ::raise(SIGKILL);
        }).detach();
      }
      const auto start = std::chrono::steady_clock::now();
      world.settle("an answer", "text", [](const auto&) {
        std::this_thread::sleep_for(800ms);
        return std::string("words");
      });
      const auto waited = std::chrono::steady_clock::now() - start;
      std::printf(
          "waited=%d\n",
          static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(waited).count()));
      return 0;
    });
  });
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  const int waited = launched.printed_number("waited");
  EXPECT_GE(waited, 800);
  EXPECT_LT(waited, 4000) << launched.err();
}

TEST(LocalRanksTest, ListenOnLoopbackAlone) {
  LaunchedProcess launched([] {
    return World::launch(2,
                         [](World& world) {
                           for (const std::string& address : addresses_listened_at()) {
                             std::fprintf(stderr, "listens at %s\n", address.c_str());
                           }
                           world.communicator().barrier("all have looked").wait();
                           return 0;
                         },
                         {.transport = Transport::kGloo});
  });
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  const std::string lines = launched.err();
  // Rank 0 at least, for the store.
  EXPECT_THAT(lines, HasSubstr("[rank 0] listens at "));
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    if (line.find("listens at ") == std::string::npos) continue;
    // 127.0.0.1, or the same as an address of IPv6.
    EXPECT_THAT(line, ContainsRegex("listens at (0000000000000000FFFF0000)?0100007F$"));
  }
}

TEST(LocalRanksTest, HaveTheirPortFromTheLauncherBeforeAnybodyListens) {
  LaunchedProcess launched([] {
    LaunchOptions launch;
    launch.ranks = 2;
    return launch_function(
        [] {
          const Place place = read_place();
          std::fprintf(stderr, "socket %s\n", place.store_socket >= 0 ? "given" : "missing");
          return 0;
        },
        launch);
  });
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_THAT(launched.err(), HasSubstr("[rank 0] socket given"));
  EXPECT_THAT(launched.err(), HasSubstr("[rank 1] socket missing"));
}

}  // namespace
}  // namespace zeropage::comm::stopped_ranks_test
