#include "zero/layout/shard_layout.h"

#include <gtest/gtest.h>

#include "zeropage/bytes.h"

namespace zeropage::shard_layout_test {
namespace {

using memory::operator""_KiB;
using memory::operator""_MiB;

zero::StorageSpec spec(const std::string& name, int64_t numel, int unit = 0) {
  return {.name = name, .numel = numel, .unit = unit};
}

std::vector<zero::PageLayout> lay_out(const std::vector<zero::StorageSpec>& storages,
                                      int world_size = 2, int64_t page_bytes = 64_KiB) {
  return zero::lay_out_pages(storages, {.world_size = world_size, .page_bytes = page_bytes});
}

TEST(ShardLayoutTest, PacksInOrderAtAlignedOffsets) {
  const auto pages = lay_out({spec("a.w", 10), spec("a.b", 3), spec("a.c", 16)});
  ASSERT_EQ(pages.size(), 1U);
  EXPECT_EQ(pages[0].slots[0].range, (Range{0, 10}));
  EXPECT_EQ(pages[0].slots[1].range, (Range{16, 19}));
  EXPECT_EQ(pages[0].slots[2].range, (Range{32, 48}));
  EXPECT_EQ(pages[0].numel, 48);
  EXPECT_EQ(pages[0].name, "a");
}

TEST(ShardLayoutTest, PadsTheLastRankWhenNumelDoesNotDivide) {
  for (const int world_size : {1, 2, 3, 4, 7, 8, 64, 1024}) {
    const auto pages = lay_out({spec("w", 10'007)}, world_size);
    const zero::PageLayout& page = pages.front();
    EXPECT_EQ(page.shard_numel % zero::kShardBlockNumel, 0);
    EXPECT_GE(page.padded_numel(world_size), page.numel);
    EXPECT_LT(page.padded_numel(world_size) - page.numel, world_size * zero::kShardBlockNumel);
    int64_t covered = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(page.shard(rank).begin, covered);
      covered = page.shard(rank).end;
    }
    EXPECT_EQ(covered, page.padded_numel(world_size));
  }
}

TEST(ShardLayoutTest, GivesEveryRankAShardOfTheSmallestPage) {
  const auto pages = lay_out({spec("scalar", 1), spec("empty", 0)}, 8);
  ASSERT_EQ(pages.size(), 1U);
  EXPECT_EQ(pages[0].shard_numel, zero::kShardBlockNumel);
  EXPECT_TRUE(intersection(pages[0].shard(7), pages[0].slots[0].range).empty());
}

TEST(ShardLayoutTest, PlacesAPageOfNothingButEmptyParameters) {
  const auto pages = lay_out({spec("empty", 0)}, 3);
  ASSERT_EQ(pages.size(), 1U);
  EXPECT_EQ(pages[0].numel, 0);
  EXPECT_EQ(pages[0].shard_numel, zero::kShardBlockNumel);
}

TEST(ShardLayoutTest, ClosesAPageBeforeItExceedsItsBytes) {
  const auto pages = lay_out({spec("a", 10'000), spec("b", 10'000), spec("c", 10'000)});
  ASSERT_EQ(pages.size(), 3U);
  EXPECT_EQ(pages[1].slots[0].storage, 1U);
}

TEST(ShardLayoutTest, NeverSplitsAStorageLargerThanAPage) {
  const auto pages = lay_out({spec("small", 100), spec("huge", 1'000'000), spec("next", 100)});
  ASSERT_EQ(pages.size(), 3U);
  EXPECT_EQ(pages[1].numel, 1'000'000);
}

TEST(ShardLayoutTest, EndsAPageWithItsUnitUnlessTheUnitIsSmall) {
  const auto large = lay_out({spec("blocks.0.w", 5000, 1), spec("blocks.1.w", 5000, 2)});
  EXPECT_EQ(large.size(), 2U);
  EXPECT_EQ(large[1].name, "blocks.1.w");
  const auto small = lay_out({spec("blocks.0.w", 50, 1), spec("blocks.1.w", 50, 2)});
  EXPECT_EQ(small.size(), 1U);
}

TEST(ShardLayoutTest, SeparatesDtypesAndFrozenParameters) {
  std::vector<zero::StorageSpec> storages = {spec("a", 10), spec("b", 10), spec("c", 10),
                                             spec("d", 10)};
  storages[1].requires_grad = false;
  storages[2].dtype = c10::ScalarType::BFloat16;
  const auto pages = lay_out(storages);
  ASSERT_EQ(pages.size(), 3U);
  EXPECT_EQ(pages[0].slots.size(), 2U);  // a and d
  EXPECT_FALSE(pages[1].requires_grad);
  EXPECT_EQ(pages[2].dtype, c10::ScalarType::BFloat16);
}

TEST(ShardLayoutTest, NamesAPageByWhatItsParametersShare) {
  EXPECT_EQ(lay_out({spec("blocks.3.norm.weight", 1), spec("blocks.3.up.bias", 1)})[0].name,
            "blocks.3");
  EXPECT_EQ(lay_out({spec("head.weight", 1)})[0].name, "head.weight");
  EXPECT_EQ(lay_out({spec("embedding.weight", 1), spec("final.bias", 1)})[0].name,
            "embedding.weight .. final.bias");
}

TEST(ShardLayoutTest, TellsPagesOfOneBlockApart) {
  const auto pages =
      lay_out({spec("b.0.up", 16'000), spec("b.0.down", 16'000), spec("b.1", 16'000)});
  ASSERT_EQ(pages.size(), 3U);
  const auto halves = lay_out({spec("b.0.up.w", 10'000), spec("b.0.norm", 10),
                               spec("b.0.down.w", 10'000), spec("b.0.bias", 10)});
  ASSERT_EQ(halves.size(), 2U);
  EXPECT_EQ(halves[0].name, "b.0");
  EXPECT_EQ(halves[1].name, "b.0 (part 2)");
}

TEST(ShardLayoutTest, IntersectsRanges) {
  EXPECT_EQ(intersection({0, 10}, {5, 20}), (Range{5, 10}));
  EXPECT_TRUE(intersection({0, 5}, {7, 9}).empty());
  EXPECT_EQ(intersection({0, 5}, {7, 9}).numel(), 0);
}

// Persistent bytes of a rank against the formula, at the world sizes of the promise.
TEST(ShardLayoutTest, PadsLessThanHalfAPercentOfALargeModel) {
  std::vector<zero::StorageSpec> storages;
  for (int block = 0; block < 48; ++block) {
    storages.push_back(spec(c10::str("blocks.", block, ".w"), 3'152'384, block));
  }
  for (const int world_size : {1, 2, 3, 4, 5, 7, 8}) {
    int64_t padded = 0;
    int64_t numel = 0;
    for (const zero::PageLayout& page : lay_out(storages, world_size, 16_MiB)) {
      padded += page.padded_numel(world_size);
      numel += page.numel;
    }
    EXPECT_LE(static_cast<double>(padded), 1.005 * static_cast<double>(numel)) << world_size;
  }
}

}  // namespace
}  // namespace zeropage::shard_layout_test
