// The rules of LibTorch's CUDA caching allocator, one by one. tests/planning/libtorch_allocator_test.cpp compares the
// model with the allocator itself.
#include "planning/caching_allocator.h"

#include <gtest/gtest.h>

#include "zeropage/bytes.h"

namespace zeropage::caching_allocator_test {
namespace {

using namespace memory;
using zeropage::planning::CachingAllocator;

constexpr int64_t kCompute = 0;
constexpr int64_t kGathers = 1;

CachingAllocator with_fixed_segments(int64_t limit_bytes = 0) {
  return CachingAllocator({.expandable_segments = false, .limit_bytes = limit_bytes});
}
CachingAllocator with_expandable_segments(int64_t limit_bytes = 0) {
  return CachingAllocator({.expandable_segments = true, .limit_bytes = limit_bytes});
}

TEST(CachingAllocatorTest, TakesSegmentsBySizeOfTheRequest) {
  CachingAllocator allocator = with_fixed_segments();
  allocator.allocate(1, kCompute);
  EXPECT_EQ(allocator.used_bytes(), 512);
  EXPECT_EQ(allocator.reserved_bytes(), 2_MiB);
  allocator.allocate(1_MiB, kCompute);
  EXPECT_EQ(allocator.reserved_bytes(), 2_MiB) << "the rest of the segment of small requests";
  allocator.allocate(3_MiB, kCompute);
  EXPECT_EQ(allocator.reserved_bytes(), 22_MiB);
  allocator.allocate(10_MiB, kCompute);
  EXPECT_EQ(allocator.reserved_bytes(), 22_MiB) << "the rest of the segment of 20 MiB";
  allocator.allocate(65_MiB, kCompute);
  EXPECT_EQ(allocator.reserved_bytes(), 88_MiB) << "rounded up to 2 MiB";
}

// Requests have 64 MiB and a bit, like a page's buffer.
TEST(CachingAllocatorTest, LosesTheRestOfAFixedSegmentAndNotOfAnExpandableOne) {
  CachingAllocator fixed = with_fixed_segments();
  CachingAllocator expandable = with_expandable_segments();
  for (int page = 0; page < 10; ++page) {
    fixed.allocate(64_MiB + 4_KiB, kCompute);
    expandable.allocate(64_MiB + 4_KiB, kCompute);
  }
  EXPECT_EQ(fixed.reserved_bytes(), 660_MiB);
  EXPECT_EQ(expandable.reserved_bytes(), 660_MiB) << "33 granules of 20 MiB";
  for (int page = 0; page < 90; ++page) {
    fixed.allocate(64_MiB + 4_KiB, kCompute);
    expandable.allocate(64_MiB + 4_KiB, kCompute);
  }
  EXPECT_EQ(fixed.reserved_bytes(), 6600_MiB);
  EXPECT_EQ(expandable.reserved_bytes(), 6420_MiB);
}

// A module that is moved to the device, and then into its pages.
TEST(CachingAllocatorTest, JoinsWhatIsFreedWithinASegmentAlone) {
  CachingAllocator fixed = with_fixed_segments();
  CachingAllocator expandable = with_expandable_segments();
  for (CachingAllocator* const allocator : {&fixed, &expandable}) {
    const auto first = allocator->allocate(40_MiB, kCompute);
    const auto second = allocator->allocate(40_MiB, kCompute);
    allocator->free(*first);
    allocator->free(*second);
    EXPECT_EQ(allocator->used_bytes(), 0);
    EXPECT_EQ(allocator->reserved_bytes(), 80_MiB);
    allocator->allocate(80_MiB, kCompute);
  }
  EXPECT_EQ(fixed.reserved_bytes(), 160_MiB);
  EXPECT_EQ(expandable.reserved_bytes(), 80_MiB);
}

TEST(CachingAllocatorTest, KeepsTheMemoryOfStreamsApart) {
  CachingAllocator allocator = with_expandable_segments();
  allocator.free(*allocator.allocate(100_MiB, kGathers));
  allocator.allocate(100_MiB, kCompute);
  EXPECT_EQ(allocator.reserved_bytes(), 200_MiB);
}

TEST(CachingAllocatorTest, GivesBackWhatIsCachedBeforeItPassesTheLimit) {
  for (CachingAllocator allocator :
       {with_fixed_segments(100_MiB), with_expandable_segments(100_MiB)}) {
    const auto cached = allocator.allocate(60_MiB, kGathers);
    const auto used = allocator.allocate(20_MiB, kCompute);
    EXPECT_FALSE(allocator.allocate(40_MiB, kCompute));
    allocator.free(*cached);
    EXPECT_EQ(allocator.reserved_bytes(), 80_MiB);
    EXPECT_TRUE(allocator.allocate(40_MiB, kCompute));
    EXPECT_EQ(allocator.reserved_bytes(), 60_MiB);
    allocator.free(*used);
  }
}

TEST(CachingAllocatorTest, GivesBackWholeSegmentsAndGranules) {
  CachingAllocator fixed = with_fixed_segments();
  CachingAllocator expandable = with_expandable_segments();
  for (CachingAllocator* const allocator : {&fixed, &expandable}) {
    const auto first = allocator->allocate(50_MiB, kCompute);
    allocator->allocate(10_MiB, kCompute);
    allocator->free(*first);
    allocator->release_cached();
  }
  EXPECT_EQ(fixed.reserved_bytes(), 10_MiB);
  // 10 MiB of the third granule are used.
  EXPECT_EQ(expandable.reserved_bytes(), 20_MiB);
}

}  // namespace
}  // namespace zeropage::caching_allocator_test
