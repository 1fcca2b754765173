#include "memory/mapping_pool.h"

#include <cstring>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "memory/bytes.h"

namespace zeropage::memory::mapping_pool_test {
namespace {

size_t mebibytes(size_t count) {
  return count << 20;
}

TEST(MappingPoolTest, HandsAFreedBlockOutAgain) {
  MappingPool pool;
  const auto first = pool.take(mebibytes(2));
  pool.give_back(first);
  EXPECT_EQ(pool.idle_bytes(), mebibytes(2));
  const auto second = pool.take(mebibytes(2) - 100);
  EXPECT_EQ(second.data, first.data);
  EXPECT_EQ(pool.idle_bytes(), 0U);
  pool.give_back(second);
}

TEST(MappingPoolTest, DoesNotWasteALargeBlockOnASmallRequest) {
  MappingPool pool;
  const auto large = pool.take(mebibytes(8));
  pool.give_back(large);
  const auto small = pool.take(mebibytes(1));
  EXPECT_EQ(small.bytes, mebibytes(1));
  pool.give_back(small);
}

TEST(MappingPoolTest, NeverMapsMoreThanWasLiveAtOnce) {
  MappingPool pool;
  // Sizes that never fit each other.
  for (size_t round = 1; round < 20; ++round) {
    const auto block = pool.take(mebibytes(round));
    EXPECT_LE(pool.live_bytes() + pool.idle_bytes(), mebibytes(round));
    pool.give_back(block);
  }
  const auto small = pool.take(mebibytes(1));
  EXPECT_LE(pool.live_bytes() + pool.idle_bytes(), mebibytes(19));
  pool.give_back(small);
}

TEST(MappingPoolTest, KeepsItsBoundWhenTheSystemRefuses) {
  MappingPool pool;
  const auto block = pool.take(mebibytes(2));
  EXPECT_THROW(pool.take(size_t{1} << 62), std::bad_alloc);
  pool.give_back(block);
  for (size_t round = 3; round < 6; ++round) pool.give_back(pool.take(mebibytes(round)));
  EXPECT_LE(pool.live_bytes() + pool.idle_bytes(), mebibytes(5));
}

TEST(MappingPoolTest, ServesThreadsAtOnce) {
  MappingPool pool;
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&pool, id] {
      for (int round = 0; round < 200; ++round) {
        const auto block = pool.take(static_cast<size_t>(4096 * (1 + (round + id) % 7)));
        std::memset(block.data, id, block.bytes);
        EXPECT_EQ(static_cast<char*>(block.data)[block.bytes - 1], id);
        pool.give_back(block);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(pool.live_bytes(), 0U);
}

}  // namespace
}  // namespace zeropage::memory::mapping_pool_test
