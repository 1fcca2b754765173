// What texts of ranks cost the store.
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/harness/ranks.h"
#include "zeropage/communicator.h"

namespace zeropage::comm::text_rounds_test {
namespace {

using testing::message_of;
using testing::run_ranks;
using testing::try_ranks;

// One rank's connection to a store of all: counts what is asked over it. What watches ask is not counted.
class CountingStore final : public c10d::Store {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::HashStore> inner) : inner_(std::move(inner)) {}

  struct Counts {
    int64_t requests = 0;  // but for looks
    int64_t looks = 0;     // whether keys are there: more of them the longer others take
    int64_t written_bytes = 0;
  };
  Counts counts() const { return {requests_, looks_, written_bytes_}; }

  c10::intrusive_ptr<Store> clone() override { return inner_; }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    written_bytes_ += static_cast<int64_t>(value.size());
    inner_->set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    ++requests_;
    return inner_->compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++requests_;
    return inner_->get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++requests_;
    return inner_->multiGet(keys);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++requests_;
    return inner_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    ++requests_;
    return inner_->deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++looks_;
    return inner_->check(keys);
  }
  int64_t getNumKeys() override { return inner_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { inner_->wait(keys); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    inner_->wait(keys, timeout);
  }

 private:
  const c10::intrusive_ptr<c10d::HashStore> inner_;
  std::atomic<int64_t> requests_{0};
  std::atomic<int64_t> looks_{0};
  std::atomic<int64_t> written_bytes_{0};
};

// By rank.
class CountingStores {
 public:
  explicit CountingStores(int ranks) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    for (int rank = 0; rank < ranks; ++rank) {
      stores_.push_back(c10::make_intrusive<CountingStore>(shared));
    }
  }
  const c10::intrusive_ptr<CountingStore>& operator[](int rank) const {
    return stores_[static_cast<size_t>(rank)];
  }

 private:
  std::vector<c10::intrusive_ptr<CountingStore>> stores_;
};

// What `round` asked of the store in each rank.
template <typename Round>
std::vector<CountingStore::Counts> counts_of(int ranks, const Round& round) {
  const CountingStores stores(ranks);
  std::vector<CountingStore::Counts> counts(static_cast<size_t>(ranks));
  run_ranks(ranks,
            [&](World& world) {
              const CountingStore& store = *stores[world.rank()];
              world.communicator().barrier("all are here").wait();
              const auto before = store.counts();
              round(world);
              const auto after = store.counts();
              counts[static_cast<size_t>(world.rank())] = {
                  after.requests - before.requests, after.looks - before.looks,
                  after.written_bytes - before.written_bytes};
            },
            {.store = [&](int rank) { return stores[rank]; }});
  return counts;
}

class TextRoundsTest : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }

  // most: requests of one rank, without looks. Those grow with the time, and with log2(N) where somebody is late.
  template <typename Round>
  void expect_requests_le(int64_t most, const Round& round) const {
    const auto begin = std::chrono::steady_clock::now();
    const auto counts = counts_of(ranks(), round);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    const auto halvings = std::bit_width(static_cast<unsigned>(ranks()));
    for (const auto& of_rank : counts) {
      EXPECT_LE(of_rank.requests, most);
      EXPECT_LE(static_cast<double>(of_rank.looks), 24 + (20 + 10 * halvings) * took.count());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, TextRoundsTest, ::testing::Values(2, 8, 48));

TEST_P(TextRoundsTest, AGatherIsAFewRequestsOfEachRank) {
  expect_requests_le(6, [&](const World& world) {
    const auto texts = world.gather_text("a test", std::to_string(world.rank()));
    ASSERT_EQ(texts.size(), static_cast<size_t>(world.size()));
    EXPECT_EQ(texts.back(), std::to_string(world.size() - 1));
  });
}

TEST_P(TextRoundsTest, AnAnswerIsAFewRequestsOfEachRank) {
  expect_requests_le(6, [](const World& world) {
    world.settle("a test", "text", [](const auto& texts) { return std::to_string(texts.size()); });
  });
}

TEST_P(TextRoundsTest, AnAgreementIsAFewRequestsOfEachRank) {
  expect_requests_le(6, [](const World& world) {
    world.check_agreement("the model", {"stage: 1", "layers: 4"});
  });
}

TEST(TextRoundsBytesTest, RanksThatAgreeWriteHashes) {
  const std::string line(100'000, 'x');
  for (const auto& of_rank : counts_of(3, [&](const World& world) {
         world.check_agreement("the model", {line, line});
       })) {
    EXPECT_LT(of_rank.written_bytes, 100);
  }
}

TEST(TextRoundsBytesTest, RanksThatDifferInALongTextAreToldOfTheLine) {
  std::vector<std::string> lines(1000, std::string(100, 'x'));
  const auto errors = try_ranks(3, [&](World& world) {
    std::vector<std::string> own = lines;
    if (world.rank() == 1) own[700] = "something else";
    world.check_agreement("the model", own);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error),
                ::testing::HasSubstr(c10::str("the model differs between ranks; make it the same "
                                              "on all:\n  rank 0 has ",
                                              lines[700], "; rank 1 has something else")));
  }
}

TEST(TextRoundsLateTest, NamesAllRanksThatDidNotComeByTheDeadline) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::array<std::string, 3> messages;
  std::vector<std::thread> threads;
  for (size_t index = 0; index < messages.size(); ++index) {
    threads.emplace_back([&, index] {
      constexpr std::array<int, 3> kPresent = {0, 2, 3};
      try {
        World({.rank = kPresent[index], .world_size = 5, .launcher = "test"}, store,
              {.deadline = std::chrono::milliseconds(400)});
      } catch (const c10::Error& error) {
        messages[index] = error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(messages,
              ::testing::Each(::testing::HasSubstr("the world: rank 1, 4 did not come within")));
}

}  // namespace
}  // namespace zeropage::comm::text_rounds_test
