// Files that examples write at their end, tried before they begin.
#include "examples/output_files/output_files.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"

namespace zeropage::output_files_test {
namespace {

using examples::check_outputs;
using examples::write_output;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

std::string text_in(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(OutputFilesTest, KeepsWhatIsInAFileAndLeavesNoneBehind) {
  const testing::DiskFolder folder;
  const std::string old = folder.path() + "/old.json", fresh = folder.path() + "/fresh.json";
  std::ofstream(old) << "kept";
  check_outputs({{"--json", old}, {"--report", fresh}, {"--trace", ""}});
  EXPECT_EQ(text_in(old), "kept");
  EXPECT_FALSE(std::filesystem::exists(fresh));
  write_output({"--json", old}, "new");
  EXPECT_EQ(text_in(old), "new");
}

TEST(OutputFilesTest, RefusesAFileThatCannotBeOpened) {
  const testing::DiskFolder folder;
  const std::string lost = folder.path() + "/none/run.json";
  EXPECT_THAT(error_of([&] {
                check_outputs({{"--json", lost}});
              }),
              AllOf(HasSubstr("--json " + lost), HasSubstr("No such file or directory")));
  EXPECT_THAT(error_of([&] {
                check_outputs({{"--json", folder.path()}});
              }),
              HasSubstr("Is a directory"));
}

TEST(OutputFilesTest, RefusesTwoFlagsForOneFile) {
  const testing::DiskFolder folder;
  EXPECT_THAT(error_of([&] {
                check_outputs({{"--json", folder.path() + "/run.json"},
                               {"--trace", folder.path() + "/./run.json"}});
              }),
              AllOf(HasSubstr("--trace"), HasSubstr("--json writes to the same file")));
}

TEST(OutputFilesTest, NoticesAFullDisk) {
  EXPECT_THAT(error_of([] {
                write_output({"--json", "/dev/full"}, "text");
              }),
              AllOf(HasSubstr("--json /dev/full"), HasSubstr("No space left on device")));
}

}  // namespace
}  // namespace zeropage::output_files_test
