#include "device/host_memory.h"

#include <filesystem>
#include <fstream>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "zeropage/bytes.h"

namespace zeropage::device::host_memory_test {
namespace {

using memory::operator""_GiB;
using memory::operator""_MiB;

using testing::error_of;
using ::testing::HasSubstr;

// The files that a kernel would have.
class HostMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write("proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:           10 kB\nMemAvailable:    3145728 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((folder_ / path).parent_path());
    std::ofstream(folder_ / path) << text;
  }
  HostMemory read() const {
    return read_host_memory(
        {.proc = (folder_ / "proc").string(), .cgroups = (folder_ / "cgroup").string()});
  }

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() /
                                        ("zeropage-host-memory-" + std::to_string(::getpid()));
};

TEST_F(HostMemoryTest, IsWhatTheKernelSaysWhereNoGroupHasALimit) {
  write("proc/self/cgroup", "0::/user\n");
  write("cgroup/user/memory.max", "max\n");
  write("cgroup/user/memory.current", "4096\n");
  const HostMemory memory = read();
  EXPECT_EQ(memory.total_bytes, 16_GiB);
  EXPECT_EQ(memory.usable_bytes(), 3_GiB);
  EXPECT_EQ(describe(memory), "MemAvailable 3.00 GiB of 16.00 GiB, no cgroup limit");
}

TEST_F(HostMemoryTest, IsWhatTheTightestGroupAboveLeaves) {
  write("proc/self/cgroup", "0::/job/task\n");
  write("cgroup/job/task/memory.max", std::to_string(8_GiB));
  write("cgroup/job/task/memory.current", std::to_string(1_GiB));
  write("cgroup/job/memory.max", std::to_string(4_GiB));
  write("cgroup/job/memory.current", std::to_string(3_GiB));
  // Given back when memory is short.
  write("cgroup/job/memory.stat",
        "anon 5\nactive_file 7\ninactive_file " + std::to_string(512_MiB) + "\n");
  const HostMemory memory = read();
  ASSERT_TRUE(memory.cgroup);
  EXPECT_EQ(memory.cgroup->limit_bytes, 4_GiB);
  EXPECT_EQ(memory.usable_bytes(), 1536_MiB);
  EXPECT_EQ(describe_need(12_GiB, memory),
            "needs 12.00 GiB on the host, which has 1.50 GiB: MemAvailable 3.00 GiB of 16.00 GiB, "
            "cgroup limit 4.00 GiB with 2.50 GiB in use");
}

TEST_F(HostMemoryTest, KnowsVersionOneAndGroupsThatAContainerSeesAsTheRoot) {
  write("proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/\n");
  write("cgroup/memory/memory.limit_in_bytes", std::to_string(2_GiB));
  write("cgroup/memory/memory.usage_in_bytes", std::to_string(1_GiB));
  write("cgroup/memory/memory.stat",
        "inactive_file 3\ntotal_inactive_file " + std::to_string(256_MiB) + "\n");
  EXPECT_EQ(read().usable_bytes(), 1280_MiB);
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(read().usable_bytes(), 3_GiB) << "that is version one's word for no limit";
}

TEST_F(HostMemoryTest, LeavesNothingWhereAGroupIsPastItsLimit) {
  write("proc/self/cgroup", "0::/\n");
  write("cgroup/memory.max", "4096");
  write("cgroup/memory.current", "8192");
  EXPECT_EQ(read().usable_bytes(), 0);
}

TEST_F(HostMemoryTest, SaysWhatItMissesInProc) {
  write("proc/meminfo", "MemTotal: 1 kB\nXMemAvailable: 1 kB\n");
  EXPECT_THAT(error_of([&] { read(); }),
              HasSubstr("expected a line \"MemAvailable: <number> kB\""));
}

TEST_F(HostMemoryTest, ReadsThisMachine) {
  const HostMemory memory = read_host_memory();
  EXPECT_GT(memory.usable_bytes(), 0);
  EXPECT_LE(memory.usable_bytes(), memory.available_bytes);
  EXPECT_LE(memory.available_bytes, memory.total_bytes);
}

}  // namespace
}  // namespace zeropage::device::host_memory_test
