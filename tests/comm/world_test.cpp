#include "zeropage/world.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/harness/ranks.h"
#include "zeropage/mesh.h"

namespace zeropage::comm::world_test {
namespace {

using testing::message_of;
using testing::run_ranks;
using testing::try_ranks;

TEST(WorldTest, GathersTextByRank) {
  run_ranks(4, [](World& world) {
    const auto texts = world.gather_text("a test", c10::str("I am ", world.rank()));
    EXPECT_THAT(texts, ::testing::ElementsAre("I am 0", "I am 1", "I am 2", "I am 3"));
  });
}

TEST(WorldTest, AgreesWhenAllSayTheSame) {
  run_ranks(3, [](World& world) {
    world.check_agreement("the model", {"stage: 1", "layers: 4"});
    world.check_agreement("the model", {});
  });
}

TEST(WorldTest, TellsEveryRankWhichRankDiffersInWhat) {
  const auto errors = try_ranks(3, [](World& world) {
    world.check_agreement("the model", {"stage: 1", world.rank() == 2 ? "layers: 5" : "layers: 4"});
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error), ::testing::HasSubstr("the model differs between ranks"));
    EXPECT_THAT(message_of(error),
                ::testing::HasSubstr("rank 0 has layers: 4; rank 2 has layers: 5"));
  }
}

TEST(WorldTest, NamesTheRankThatEndsInsteadOfComing) {
  const auto errors = try_ranks(3,
                                [](World& world) {
                                  if (world.rank() == 1) throw std::runtime_error("elsewhere");
                                  world.check_agreement("the model", {"stage: 1"});
                                },
                                {.deadline = std::chrono::seconds(30)});
  EXPECT_THAT(message_of(errors[0]), ::testing::HasSubstr("the model: lost rank 1"));
  EXPECT_THAT(message_of(errors[2]), ::testing::HasSubstr("the model: lost rank 1"));
}

// A store of ours over TCP, which takes no value of more than 8 MiB.
class StoreOverTcp {
 public:
  c10::intrusive_ptr<c10d::Store> operator()(int) const {
    c10d::TCPStoreOptions options;
    options.port = server_->getPort();
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  int64_t keys() const { return server_->getNumKeys(); }
  // Ends at its port, of all ranks in this process.
  int64_t connections() const {
    int64_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      sockaddr_in6 peer{};
      socklen_t length = sizeof(peer);
      const int fd = std::stoi(entry.path().filename());
      if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
      count += ntohs(peer.sin6_port) == server_->getPort() ? 1 : 0;
    }
    return count;
  }

 private:
  static c10::intrusive_ptr<c10d::TCPStore> serve() {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  c10::intrusive_ptr<c10d::TCPStore> server_ = serve();
};

TEST(WorldTest, SettlesTextsThatNoValueOfTheStoreCanHold) {
  const auto text_of = [](int rank) {
    return std::string(size_t{6} << 20, static_cast<char>('a' + rank));
  };
  run_ranks(3,
            [&](World& world) {
              const std::string all = world.settle("a test", text_of(world.rank()),
                                                   [](const std::vector<std::string>& texts) {
                                                     return texts[0] + texts[1] + texts[2];
                                                   });
              EXPECT_EQ(all.size(), size_t{18} << 20);
              EXPECT_TRUE(all == text_of(0) + text_of(1) + text_of(2));
              const auto texts = world.gather_text("a test", text_of(world.rank()) + text_of(7));
              EXPECT_TRUE(texts[2] == text_of(2) + text_of(7));
            },
            {.store = StoreOverTcp()});
}

// A connection takes a descriptor of the store's host for each rank, and a store that ends meanwhile would be asked for another for a minute.
TEST(WorldTest, SplitsOpenNoConnectionToTheStore) {
  const StoreOverTcp store;
  run_ranks(4,
            [&](World& world) {
              world.communicator().barrier("all are connected").wait();
              const int64_t before = store.connections();
              world.communicator().barrier("all have counted").wait();
              const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
              const World odd_and_even = world.split(world.rank() % 2, 0);
              world.communicator().barrier("all have split").wait();
              EXPECT_EQ(store.connections(), before);
              world.communicator().barrier("all have counted again").wait();
            },
            {.store = store});
}

TEST(WorldTest, LeavesNothingInTheStoreOfWhatAllHaveRead) {
  const StoreOverTcp store;
  run_ranks(3,
            [&](World& world) {
              int64_t before = 0;
              for (int round = 0; round <= 100; ++round) {
                const World beside = world.beside("a save", std::chrono::seconds(30));
                beside.settle("a test", "a text", [](const auto& texts) { return texts[1]; });
                world.settle("a test", std::string(1 << 17, 'a'),
                             [](const auto& texts) { return texts[2]; });
                world.check_agreement("the model", {"stage: 1"});
                world.gather_text("a test", std::string(1 << 17, 'a'));
                world.communicator().barrier("all have read").wait();
                if (round == 0) before = store.keys();
                EXPECT_EQ(store.keys(), before) << round;
                world.communicator().barrier("all have counted").wait();
              }
            },
            {.store = store});
}

// A rank that reads late.
class SlowStore final : public c10d::TCPStore {
 public:
  using TCPStore::TCPStore;
  bool check(const std::vector<std::string>& keys) override {
    if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return TCPStore::check(keys);
  }
  std::atomic<bool> is_slow = false;
};

// Where rank 0 ends its store ends too, and who has not read yet would take it for lost.
TEST(WorldTest, Rank0EndsOnceTheOthersHaveReadWhatTheyWereTold) {
  using Told = std::function<void(const World&)>;
  for (const Told& told :
       {Told([](const World& world) { world.gather_text("a report", "mine"); }),
        Told([](const World& world) { world.check_agreement("the model", {"stage: 1"}); })}) {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    options.isServer = false;
    options.port = server->getPort();
    std::vector<std::string> messages(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          const auto store = c10::make_intrusive<SlowStore>("127.0.0.1", options);
          World world({.rank = rank, .world_size = 3, .launcher = "test"}, store);
          world.communicator().barrier("all are here").wait();
          store->is_slow = rank != 0;
          told(world);
        } catch (const std::exception& error) {
          messages[static_cast<size_t>(rank)] = error.what();
        }
        if (rank == 0) server.reset();
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_THAT(messages, ::testing::Each(""));
  }
}

TEST(WorldTest, RefusesRanksThatBelieveInDifferentDeadlines) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> messages(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        World({.rank = rank, .world_size = 2, .launcher = "test"}, store,
              {.deadline = std::chrono::seconds(10 + rank)});
      } catch (const std::exception& error) {
        messages[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& message : messages)
    EXPECT_THAT(message, ::testing::HasSubstr("deadline: 11000 ms"));
}

TEST(WorldTest, FindsLocalRanksByHostName) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      World world({.rank = rank, .world_size = 3, .launcher = "test"}, store);
      EXPECT_EQ(world.local_rank(), rank);
      EXPECT_EQ(world.local_size(), 3);
      world.communicator().barrier("the end").wait();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(WorldTest, MeetsInAFile) {
  const auto path =
      std::filesystem::temp_directory_path() / c10::str("zeropage-world-test-", getpid());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Place place{.rank = rank, .world_size = 2, .launcher = "test"};
      place.rendezvous_file = path.string();
      World world(place, open_store(place, std::chrono::seconds(10)));
      const auto tensor = torch::ones({3});
      world.communicator().all_reduce(tensor, ReduceOp::kSum, "a test").wait();
      EXPECT_TRUE(tensor.eq(2).all().item<bool>());
    });
  }
  for (auto& thread : threads) thread.join();
  std::filesystem::remove(path);
}

TEST(WorldTest, AWorldOfOneNeedsNobody) {
  World world({}, c10::make_intrusive<c10d::HashStore>());
  const auto tensor = torch::full({3}, 5.0);
  world.communicator().all_reduce(tensor, ReduceOp::kMean, "a test").wait();
  EXPECT_TRUE(tensor.eq(5).all().item<bool>());
  world.check_agreement("anything", {"at all"});
  EXPECT_EQ(world.local_size(), 1);
}

}  // namespace
}  // namespace zeropage::comm::world_test
