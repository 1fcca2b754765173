#include "base/exact.h"

#include <gtest/gtest.h>

#include "zeropage/bytes.h"

namespace zeropage::base::exact_test {
namespace {

using memory::operator""_GiB;
using memory::operator""_KiB;
using memory::operator""_MiB;

TEST(ExactTest, DividesOnlyWithoutARest) {
  EXPECT_EQ(div_exact(12, 4), 3);
  EXPECT_THROW(div_exact(13, 4), c10::Error);
  EXPECT_THROW(div_exact(1, 0), c10::Error);
}

TEST(ExactTest, RoundsUpToMultiples) {
  EXPECT_EQ(round_up(0, 256), 0);
  EXPECT_EQ(round_up(1, 256), 256);
  EXPECT_EQ(round_up(256, 256), 256);
  EXPECT_EQ(round_up(257, 256), 512);
  EXPECT_EQ(div_ceil(7, 2), 4);
}

TEST(ExactTest, NarrowsOnlyWhatFits) {
  EXPECT_EQ(narrow<int32_t>(int64_t{-5}), -5);
  EXPECT_THROW(narrow<int32_t>(int64_t{1} << 40), c10::Error);
  EXPECT_THROW(narrow<uint32_t>(-1), c10::Error);
  EXPECT_THROW(narrow<int64_t>(~uint64_t{0}), c10::Error);
}

TEST(BytesTest, ReadsWhatPeopleWrite) {
  EXPECT_EQ(memory::parse_bytes("4096"), 4096);
  EXPECT_EQ(memory::parse_bytes("64KiB"), 64_KiB);
  EXPECT_EQ(memory::parse_bytes("16 MiB"), 16_MiB);
  EXPECT_EQ(memory::parse_bytes("16mib"), 16_MiB);
  EXPECT_EQ(memory::parse_bytes("1.5GiB"), 1536_MiB);
  EXPECT_EQ(memory::parse_bytes("4096B"), 4096);
  EXPECT_EQ(memory::parse_bytes("80GB"), 80'000'000'000);
  EXPECT_EQ(memory::parse_bytes("1.5 TB"), 1'500'000'000'000);
  EXPECT_EQ(memory::parse_bytes("79.6GiB"), 85'469'849'190);
}

TEST(BytesTest, RefusesWhatIsNoNumberOfBytes) {
  for (const char* text : {"", "MiB", "-1", "12 apples", "1.5", "0.5B", "0x10", "nan", "1e99",
                           "80GiBs", "nanGB", "1e99GB"}) {
    EXPECT_THROW(memory::parse_bytes(text), c10::Error) << text;
  }
}

TEST(BytesTest, RefusesASizeThatMayBeEither) {
  try {
    memory::parse_bytes("80G");
    FAIL() << "took it";
  } catch (const c10::Error& error) {
    EXPECT_EQ(memory::message_of(error),
              "\"80G\" may be 80GB, which is 80000000000 bytes, or 80GiB, which is 85899345920 "
              "bytes; write the one that is meant");
  }
}

TEST(BytesTest, WritesTheLargestUnitThatReads) {
  EXPECT_EQ(memory::format_bytes(0), "0 B");
  EXPECT_EQ(memory::format_bytes(1023), "1023 B");
  EXPECT_EQ(memory::format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(memory::format_bytes(16_MiB), "16.0 MiB");
  EXPECT_EQ(memory::format_bytes(5_GiB / 4), "1.25 GiB");
}

}  // namespace
}  // namespace zeropage::base::exact_test
