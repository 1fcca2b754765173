#include "memory/mapping_pool.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "zeropage/bytes.h"

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

TEST(MappingPoolTest, CutsAnIdleBlockToSizeAndJoinsItsPartsAgain) {
  MappingPool pool;
  const auto whole = pool.take(mebibytes(8));
  std::memset(whole.data, 7, whole.bytes);
  pool.give_back(whole);
  const auto first = pool.take(mebibytes(3)), second = pool.take(mebibytes(1));
  EXPECT_EQ(first.data, whole.data);
  EXPECT_EQ(second.data, static_cast<char*>(whole.data) + mebibytes(3));
  EXPECT_EQ(pool.idle_bytes(), mebibytes(4));
  for (const auto& part : {first, second}) pool.give_back(part);
  const auto again = pool.take(mebibytes(8));
  EXPECT_EQ(again.data, whole.data);
  // A new mapping would be zeros.
  const auto* bytes = static_cast<const char*>(again.data);
  EXPECT_TRUE(std::all_of(bytes, bytes + again.bytes, [](char byte) { return byte == 7; }));
  pool.give_back(again);
}

TEST(MappingPoolTest, UnmapsOfWhatIsTooSmallOnlyAsMuchAsItsBoundAsks) {
  MappingPool pool;
  const auto first = pool.take(mebibytes(16)), held = pool.take(mebibytes(1)),
             last = pool.take(mebibytes(13));
  pool.give_back(last);
  pool.give_back(first);
  const auto large = pool.take(mebibytes(20));
  EXPECT_EQ(pool.live_bytes(), mebibytes(21));
  EXPECT_EQ(pool.idle_bytes(), mebibytes(9));
  for (const auto& block : {large, held}) pool.give_back(block);
}

TEST(MappingPoolTest, BlocksOfAnySizesNeverOverlapNorPassTheBound) {
  MappingPool pool;
  std::vector<MappingPool::Block> live;
  size_t most_live = 0, random = 1;
  for (int round = 0; round < 3000; ++round) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    if (live.size() < 4 || (random >> 40) % 2 == 0) {
      const auto block = pool.take(4096 * (1 + (random >> 44) % 300));
      std::memset(block.data, static_cast<int>(live.size()), block.bytes);
      for (const auto& other : live) {
        const auto* begin = static_cast<const char*>(block.data);
        const auto* of_other = static_cast<const char*>(other.data);
        ASSERT_TRUE(begin + block.bytes <= of_other || of_other + other.bytes <= begin);
      }
      live.push_back(block);
    } else {
      std::swap(live[(random >> 44) % live.size()], live.back());
      pool.give_back(live.back());
      live.pop_back();
    }
    most_live = std::max(most_live, pool.live_bytes());
    ASSERT_LE(pool.live_bytes() + pool.idle_bytes(), most_live);
  }
  for (const auto& block : live) pool.give_back(block);
  EXPECT_EQ(pool.live_bytes(), 0U);
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
