// The segments in which LibTorch's CUDA allocator has its memory, over a stand-in for CUDA's runtime: ours, unless somebody
// set something.
#include "memory/expandable_segments.h"

#include <cstdlib>

#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>

#include "tests/harness/allocator_on_host/cuda_runtime_stand_in.h"

namespace zeropage::memory::expandable_segments_test {
namespace {

// In a process of their own, as LibTorch keeps what it was told.
class ExpandableSegmentsDeathTest : public ::testing::Test {
 protected:
  ExpandableSegmentsDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  [[noreturn]] static void end_with(bool uses) { std::_Exit(uses ? 1 : 0); }
  [[noreturn]] static void end_with_what_is_used() {
    unsetenv("PYTORCH_ALLOC_CONF");
    unsetenv("PYTORCH_CUDA_ALLOC_CONF");
    prefer_expandable_segments();
    end_with(uses_expandable_segments());
  }
};

TEST_F(ExpandableSegmentsDeathTest, AreUsedWhereNobodyChose) {
  EXPECT_EXIT(end_with_what_is_used(), ::testing::ExitedWithCode(1), "");
}

TEST_F(ExpandableSegmentsDeathTest, AreNotUsedWhereADeviceCannotMapMemory) {
  EXPECT_EXIT(
      {
        zeropage::testing::let_stand_in_map_memory(false);
        end_with_what_is_used();
      },
      ::testing::ExitedWithCode(0), "");
}

// Whatever it sets: who writes one setting has read what the others are.
TEST_F(ExpandableSegmentsDeathTest, AreNotUsedWhereTheUserSetTheAllocator) {
  for (const char* variable : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    EXPECT_EXIT(
        {
          setenv(variable, "max_split_size_mb:512", /*overwrite=*/1);
          prefer_expandable_segments();
          end_with(uses_expandable_segments());
        },
        ::testing::ExitedWithCode(0), "");
  }
  EXPECT_EXIT(
      {
        c10::cuda::CUDACachingAllocator::setAllocatorSettings("max_split_size_mb:512");
        end_with_what_is_used();
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace zeropage::memory::expandable_segments_test
