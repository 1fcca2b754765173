#include "state/file_writer.h"

#include <algorithm>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/small_states.h"
#include "zeropage/saved_state.h"

namespace zeropage::state::file_writer_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

constexpr uint64_t kBufferBytes = 16384;

FileWriterOptions options_of(bool direct) {
  return {.buffer_bytes = kBufferBytes, .buffers = 2, .direct = direct};
}

std::string numbered_bytes(uint64_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& character : text) character = static_cast<char>(random());
  return text;
}

// bytes [begin, end) of `content`, in steps as large as the writer has room for.
void write_stretch(FileWriter& writer, const std::string& content, uint64_t begin, uint64_t end) {
  while (begin < end) {
    const std::span<char> room = writer.room(begin);
    ASSERT_GT(room.size(), 0U);
    const uint64_t here = std::min<uint64_t>(room.size(), end - begin);
    content.copy(room.data(), here, begin);
    writer.write(here);
    begin += here;
  }
}

// On the disk, where direct access is to be had.
class FileWriterTest : public ::testing::TestWithParam<bool> {
 protected:
  std::filesystem::path make_file(uint64_t bytes) const {
    const auto file = std::filesystem::path(folder_.path()) / "file";
    std::filesystem::remove(file);
    File(file, File::Access::kCreate).allocate(bytes);
    return file;
  }

  const DiskFolder folder_;
};

TEST_P(FileWriterTest, AStretchOfAnyOffsetAndSizeComesBack) {
  for (const uint64_t begin : {0, 1, 4095, 4096, 5000, 16383, 16384, 20001}) {
    for (const uint64_t bytes : {0, 1, 100, 4096, 4097, 12288, 16384, 50000}) {
      const std::string content = numbered_bytes(begin + bytes + 10, 1);
      const auto file = make_file(content.size());
      FileWriter writer(file, options_of(GetParam()));
      write_stretch(writer, content, begin, begin + bytes);
      writer.finish();
      std::string expected(content.size(), '\0');
      expected.replace(begin, bytes, content, begin, bytes);
      ASSERT_TRUE(bytes_in(file) == expected) << begin << " " << bytes;
    }
  }
}

TEST_P(FileWriterTest, TwoWritersMayShareASectorAndABuffer) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    const std::string content = numbered_bytes(200'000, seed);
    std::mt19937 random(seed);
    const auto file = make_file(content.size());
    std::vector<uint64_t> cuts = {0, content.size()};
    for (int i = 0; i < 40; ++i) cuts.push_back(random() % content.size());
    std::sort(cuts.begin(), cuts.end());
    FileWriter one(file, options_of(GetParam()));
    FileWriter other(file, options_of(GetParam()));
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      write_stretch(i % 2 == 0 ? one : other, content, cuts[i], cuts[i + 1]);
    }
    one.finish();
    other.finish();
    ASSERT_TRUE(bytes_in(file) == content) << seed;
  }
}

TEST_P(FileWriterTest, MemoryThatStaysIsWrittenFromWhereItLies) {
  const std::string content = numbered_bytes(70'000, 7);
  for (const uint64_t shift : {0, 1, 4096, 4097}) {
    std::unique_ptr<char, decltype(&std::free)> memory(
        static_cast<char*>(std::aligned_alloc(4096, 81920)), &std::free);
    content.copy(memory.get() + shift, content.size());
    const auto file = make_file(content.size() + 5000);
    FileWriter writer(file, options_of(GetParam()));
    writer.write_from(shift, memory.get() + shift, content.size());
    writer.write_from(shift, memory.get() + shift, 0);
    writer.finish();
    ASSERT_TRUE(bytes_in(file).substr(shift, content.size()) == content) << shift;
  }
}

TEST_P(FileWriterTest, WritingGoesOnAfterFinish) {
  const std::string content = numbered_bytes(40'000, 8);
  const auto file = make_file(content.size());
  FileWriter writer(file, options_of(GetParam()));
  writer.finish();
  write_stretch(writer, content, 0, 20'000);
  writer.finish();
  write_stretch(writer, content, 20'000, content.size());
  writer.finish();
  EXPECT_TRUE(bytes_in(file) == content);
}

INSTANTIATE_TEST_SUITE_P(ThroughThePageCacheAndPastIt, FileWriterTest, ::testing::Bool());

TEST(FileWriterErrorsTest, AFileThatIsNotThereIsNamed) {
  try {
    FileWriter writer("/no/such/file", {});
    FAIL();
  } catch (const StateError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/no/such/file: open: No such file"));
  }
}

// /dev/full takes no byte.
TEST(FileWriterErrorsTest, AFullDiskIsSaidByFinishAndByTheNextRoom) {
  FileWriter writer("/dev/full", options_of(false));
  EXPECT_FALSE(FileWriter("/dev/full", options_of(false)).is_direct());
  std::fill_n(writer.room(0).begin(), 100, 'x');
  writer.write(100);
  try {
    writer.finish();
    FAIL();
  } catch (const StateError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/dev/full: write of 100 bytes at byte 0: No space left"));
    EXPECT_THAT(error.what(), HasSubstr("make room on that disk"));
  }
  EXPECT_THROW(writer.room(100), StateError);
  EXPECT_THROW(writer.finish(), StateError);
}

TEST(FileWriterErrorsTest, AWriterThatGivesWayWritesTheSame) {
  const StateScratch scratch;
  File(scratch / "file", File::Access::kCreate).allocate(10);
  FileWriter writer(scratch / "file", {.low_priority = true});
  write_stretch(writer, "0123456789", 0, 10);
  writer.finish();
  EXPECT_EQ(bytes_in(scratch / "file"), "0123456789");
}

}  // namespace
}  // namespace zeropage::state::file_writer_test
