#include "offload/nvme_file.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/faulty_device.h"

namespace zeropage::offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using zeropage::testing::DeviceScript;
using zeropage::testing::error_of;
using zeropage::testing::faulty;

constexpr int64_t kBlock = 8192;

// A folder on the disk that the build is on: /tmp may be in memory.
class NvmeFileTest : public ::testing::Test {
 protected:
  NvmeFileTest() {
    std::string pattern = std::filesystem::current_path() / "nvme-test-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~NvmeFileTest() override { std::filesystem::remove_all(folder_); }

  NvmeFileOptions options(NvmeEngine engine = NvmeEngine::kAutomatic) const {
    return {.directory = folder_,
            .name = "rank-0.optimizer",
            .owner = "optimizer state",
            .block_bytes = kBlock,
            .queue_depth = 3,
            .engine = engine};
  }
  NvmeFileOptions scripted(const std::shared_ptr<DeviceScript>& script) const {
    NvmeFileOptions options = this->options();
    options.wrap = faulty(script);
    return options;
  }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  // Contents that differ by record and by write.
  static at::Tensor contents(const NvmeFile& file, size_t record, int64_t write) {
    const at::Tensor buffer = make_buffer(file.buffer_bytes(record));
    auto* bytes = buffer.mutable_data_ptr<uint8_t>();
    for (int64_t i = 0; i < buffer.numel(); ++i) {
      const auto place = static_cast<uint64_t>(i + 1000 * write) + 7919 * record;
      bytes[i] = static_cast<uint8_t>((place * 2654435761U) >> 13);
    }
    return buffer;
  }
  static void write(NvmeFile& file, size_t record, int64_t number) {
    file.start_write(record, contents(file, record, number)).wait();
  }
  static bool has(NvmeFile& file, size_t record, int64_t number) {
    const at::Tensor buffer = make_buffer(file.buffer_bytes(record));
    buffer.fill_(0xEE);
    file.start_read(record, buffer).wait();
    const int64_t bytes = file.record_bytes(record);
    return at::equal(buffer.narrow(0, 0, bytes),
                     contents(file, record, number).narrow(0, 0, bytes));
  }

  std::string folder_;
};

TEST_F(NvmeFileTest, GivesBackWhatWasWrittenForAnySizeByBothEngines) {
  const std::vector<int64_t> sizes = {0, 1, 4095, 4096, 4097, kBlock, kBlock + 1, 10 * kBlock + 77};
  for (const NvmeEngine engine : {NvmeEngine::kIoUring, NvmeEngine::kThreads}) {
    NvmeFile file(options(engine), sizes);
    for (int64_t number = 0; number < 3; ++number) {
      std::vector<memory::Pending> writes;
      for (size_t record = 0; record < sizes.size(); ++record) {
        writes.push_back(file.start_write(record, contents(file, record, number)));
      }
      for (const auto& pending : writes) pending.wait();
      for (size_t record = sizes.size(); record-- > 0;) EXPECT_TRUE(has(file, record, number));
    }
  }
}

TEST_F(NvmeFileTest, MovesEachRecordOnceWithItsPaddingAlone) {
  const std::vector<int64_t> sizes = {5 * kBlock, 4096, 3 * kBlock + 100};
  NvmeFile file(options(), sizes);
  for (size_t record = 0; record < sizes.size(); ++record) write(file, record, 1);
  const int64_t padded = 5 * kBlock + 4096 + 3 * kBlock + 4096;
  EXPECT_EQ(file.statistics().bytes_written, padded);
  EXPECT_EQ(file.statistics().bytes_read, 0);
  for (size_t record = 0; record < sizes.size(); ++record) EXPECT_TRUE(has(file, record, 1));
  EXPECT_EQ(file.statistics().bytes_read, padded);
  EXPECT_EQ(file.statistics().bytes_written, padded);
  EXPECT_EQ(std::filesystem::file_size(file.path()), padded);
}

}  // namespace
}  // namespace zeropage::offload
