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

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/faulty_device.h"

namespace zeropage::offload::nvme_file_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;
using zeropage::testing::DeviceScript;
using zeropage::testing::Direction;
using zeropage::testing::error_of;
using zeropage::testing::faulty;

constexpr int64_t kBlock = 8192;

class NvmeFileTest : public ::testing::Test {
 protected:
  NvmeFileOptions options(NvmeEngine engine = NvmeEngine::kAutomatic) const {
    return {.directory = folder_,
            .name = "rank-0.optimizer",
            .owner = "optimizer state",
            .block_bytes = kBlock,
            .queue_depth = 3,
            .engine = engine};
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

  const zeropage::testing::DiskFolder disk_;
  const std::string folder_ = disk_.path();
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

// Every transfer of a scenario in turn meets every fault, and what is read is right or an error.
class NvmeFaultTest : public NvmeFileTest {
 protected:
  struct Outcome {
    std::vector<std::string> read_errors;
    std::vector<std::string> write_errors;
    NvmeStatistics statistics;
    int reads = 0;
    int writes = 0;
  };

  // Writes two records and steps them twice. What fails is tried once more by the caller.
  Outcome run(const DeviceScript::Fault& fault, int64_t host_bytes_allowed) {
    const auto script = std::make_shared<DeviceScript>();
    script->faults = {fault};
    const detail::WrappedDisk disk(folder_, faulty(script));
    NvmeFileOptions options = this->options();
    options.queue_depth = 1;
    options.host_bytes_allowed = host_bytes_allowed;
    Outcome outcome;
    NvmeFile file(options, {2 * kBlock + 5, kBlock});
    const auto write_twice = [&](size_t record, int64_t number) {
      const at::Tensor buffer = contents(file, record, number);
      const std::string error = error_of([&] { file.start_write(record, buffer).wait(); });
      if (error.empty()) return;
      outcome.write_errors.push_back(error);
      EXPECT_THAT(error_of([&] { has(file, record, number); }), HasSubstr("its last write failed"));
      file.start_write(record, buffer).wait();
    };
    const auto read_twice = [&](size_t record, int64_t number) {
      const std::string error = error_of([&] { EXPECT_TRUE(has(file, record, number)); });
      if (error.empty()) return;
      outcome.read_errors.push_back(error);
      EXPECT_TRUE(has(file, record, number));
    };
    for (int64_t number = 0; number < 3; ++number) {
      for (size_t record = 0; record < file.records(); ++record) {
        if (number > 0) read_twice(record, number - 1);
        write_twice(record, number);
      }
    }
    outcome.statistics = file.statistics();
    outcome.reads = script->reads;
    outcome.writes = script->writes;
    return outcome;
  }
};

TEST_F(NvmeFaultTest, EveryTransferMayFailOnceOrComeShort) {
  const Outcome whole = run({.count = 0}, 0);
  ASSERT_EQ(whole.reads, 8);
  ASSERT_EQ(whole.writes, 12);
  for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
    for (int n = 0; n < (direction == Direction::kRead ? whole.reads : whole.writes); ++n) {
      for (const int64_t short_bytes : {0, 1, 4096, 5000}) {
        const Outcome outcome =
            run({.direction = direction, .first = n, .short_bytes = short_bytes}, 0);
        EXPECT_THAT(outcome.read_errors, IsEmpty());
        EXPECT_THAT(outcome.write_errors, IsEmpty());
      }
      const Outcome outcome = run({.direction = direction, .first = n, .error = EIO}, 0);
      EXPECT_THAT(outcome.read_errors, IsEmpty());
      EXPECT_THAT(outcome.write_errors, IsEmpty());
      EXPECT_EQ(outcome.statistics.retries, 1);
      EXPECT_EQ(outcome.statistics.bytes_written, whole.statistics.bytes_written);
      EXPECT_EQ(outcome.statistics.bytes_read, whole.statistics.bytes_read);
    }
  }
}

TEST_F(NvmeFaultTest, AReadThatFailsForGoodNamesTheRecordAndItsPlace) {
  for (int n = 0; n < 8; ++n) {
    const Outcome outcome = run({.first = n, .count = 2, .error = EIO}, 0);
    ASSERT_EQ(outcome.read_errors.size(), 1);
    EXPECT_THAT(outcome.read_errors[0],
                AllOf(HasSubstr("optimizer state: reading record "), HasSubstr("/rank-0.optimizer"),
                      HasSubstr(" at "), HasSubstr("Input/output error, and so again")));
  }
}

TEST_F(NvmeFaultTest, AWriteThatFailsForGoodMovesTheRecordToTheHostWithOneWarning) {
  for (const int error : {EIO, ENOSPC}) {
    for (int n = 0; n < 12; ++n) {
      ::testing::internal::CaptureStderr();
      const Outcome outcome =
          run({.direction = Direction::kWrite, .first = n, .count = 100, .error = error}, 1 << 20);
      const std::string warning = ::testing::internal::GetCapturedStderr();
      EXPECT_THAT(outcome.write_errors, IsEmpty());
      EXPECT_THAT(outcome.read_errors, IsEmpty());
      EXPECT_EQ(outcome.statistics.retries > 0, error == EIO);
      EXPECT_EQ(outcome.statistics.demoted_records, n < 11 ? 2 : 1);
      const size_t first = warning.find("lives in host memory");
      EXPECT_NE(first, std::string::npos);
      EXPECT_EQ(warning.find("lives in host memory", first + 1), std::string::npos);
    }
  }
}

TEST_F(NvmeFaultTest, AWriteThatNothingTakesInIsAnErrorAndCanBeRepeated) {
  for (int n = 0; n < 12; ++n) {
    const Outcome outcome =
        run({.direction = Direction::kWrite, .first = n, .error = ENOSPC}, /*host_bytes=*/4095);
    ASSERT_EQ(outcome.write_errors.size(), 1);
    EXPECT_THAT(outcome.write_errors[0],
                AllOf(HasSubstr("writing record "), HasSubstr("No space left on device"),
                      HasSubstr("does not fit into host memory"), HasSubstr("write it again")));
  }
}

TEST_F(NvmeFileTest, ADamagedByteStopsTheRunWithItsName) {
  NvmeFileOptions options = this->options();
  options.record_names = {"page 0", "page 1"};
  NvmeFile file(options, {kBlock, 3 * kBlock + 9});
  write(file, 0, 1);
  write(file, 1, 1);
  for (const int64_t place : {int64_t{0}, kBlock, 3 * kBlock + 8}) {
    const auto flip = [&] {
      std::fstream outside(file.path(), std::ios::in | std::ios::out | std::ios::binary);
      outside.seekg(file.offset(1) + place);
      const auto byte = static_cast<char>(outside.get() ^ 4);
      outside.seekp(file.offset(1) + place);
      outside.put(byte);
    };
    flip();
    EXPECT_THAT(error_of([&] { has(file, 1, 1); }),
                AllOf(HasSubstr("page 1"), HasSubstr("/rank-0.optimizer"),
                      HasSubstr(c10::str("(block ", place / kBlock, " of 4)")),
                      HasSubstr("expected checksum"), HasSubstr("of write 1"),
                      HasSubstr("the bytes have changed")));
    EXPECT_TRUE(has(file, 0, 1));
    flip();
    EXPECT_TRUE(has(file, 1, 1));
  }
}

TEST_F(NvmeFileTest, AWriteThatTheDeviceLostIsNamed) {
  const auto script = std::make_shared<DeviceScript>();
  script->faults = {{.direction = Direction::kWrite, .first = 4, .lies = true}};
  const detail::WrappedDisk disk(folder_, faulty(script));
  NvmeFile file(options(), {3 * kBlock});
  write(file, 0, 1);
  EXPECT_TRUE(has(file, 0, 1));
  write(file, 0, 2);
  EXPECT_THAT(error_of([&] { has(file, 0, 2); }),
              AllOf(HasSubstr("(block 1 of 3)"), HasSubstr("of write 2"),
                    HasSubstr("the device lost one")));
  write(file, 0, 3);
  EXPECT_TRUE(has(file, 0, 3));
}

TEST_F(NvmeFileTest, ARecordOnTheHostIsOnTheLedgerAndNeedsNoDevice) {
  const auto ledger = std::make_shared<memory::Ledger>("rank 3/8");
  const memory::LedgerScope scope(ledger);
  const auto script = std::make_shared<DeviceScript>();
  script->faults = {{.direction = Direction::kWrite, .first = 0, .error = ENOSPC}};
  const detail::WrappedDisk disk(folder_, faulty(script));
  NvmeFile file(options(), {100 * kBlock, kBlock});
  write(file, 0, 1);
  write(file, 1, 1);
  EXPECT_EQ(ledger->now()[memory::Kind::kOptimizerState], 100 * kBlock);
  const int64_t moved = file.statistics().bytes_written;
  write(file, 0, 2);
  EXPECT_TRUE(has(file, 0, 2));
  EXPECT_EQ(file.statistics().bytes_written, moved);
  EXPECT_TRUE(has(file, 1, 1));
}

TEST_F(NvmeFileTest, ARecordThatWasNeverWrittenIsNotRead) {
  NvmeFile file(options(), {kBlock});
  EXPECT_THAT(error_of([&] { has(file, 0, 1); }), HasSubstr("never written"));
}

TEST_F(NvmeFileTest, OperationsOnOneRecordKeepTheirOrder) {
  NvmeFile file(options(), {20 * kBlock});
  std::vector<memory::Pending> all;
  std::vector<at::Tensor> buffers;
  for (int64_t number = 0; number < 8; ++number) {
    all.push_back(file.start_write(0, contents(file, 0, number)));
    buffers.push_back(make_buffer(file.buffer_bytes(0)));
    all.push_back(file.start_read(0, buffers.back()));
  }
  for (const auto& pending : all) pending.wait();
  for (int64_t number = 0; number < 8; ++number) {
    EXPECT_TRUE(at::equal(buffers[static_cast<size_t>(number)], contents(file, 0, number)));
  }
}

TEST_F(NvmeFileTest, TheFileGoesWithTheObjectWhichWaitsForWhatIsInFlight) {
  const auto script = std::make_shared<DeviceScript>();
  script->delay = std::chrono::milliseconds(5);
  memory::Pending pending;
  {
    const detail::WrappedDisk disk(folder_, faulty(script));
    NvmeFile file(options(), {10 * kBlock});
    EXPECT_THAT(files(), ::testing::ElementsAre(StartsWith("rank-0.optimizer.")));
    pending = file.start_write(0, contents(file, 0, 1));
  }
  EXPECT_TRUE(pending.done());
  pending.wait();
  EXPECT_EQ(script->writes, 10);
  EXPECT_THAT(files(), IsEmpty());
}

TEST_F(NvmeFileTest, ItsNameCannotBeForetoldAndTwoRunsMayShareADirectory) {
  NvmeFile one(options(), {kBlock}), another(options(), {kBlock});
  EXPECT_NE(one.path(), another.path());
  write(one, 0, 1);
  write(another, 0, 2);
  EXPECT_TRUE(has(one, 0, 1));
  EXPECT_TRUE(has(another, 0, 2));
}

TEST_F(NvmeFileTest, WhatAKilledProcessLeftIsRemovedAndNothingElse) {
  const std::string name = folder_ + "/rank-0.optimizer";
  for (const char* left : {".Ab12xY", ".0ther1"}) std::ofstream(name + left) << "left behind";
  std::ofstream(folder_ + "/victim") << "precious";
  std::filesystem::create_symlink(folder_ + "/victim", name + ".link00");
  std::filesystem::create_hard_link(folder_ + "/victim", name + ".link11");
  std::ofstream(name + ".longer.name") << "somebody's";
  const NvmeFile held(options(), {kBlock});
  const NvmeFile file(options(), {kBlock});
  const auto base = [](const NvmeFile& of) { return std::filesystem::path(of.path()).filename(); };
  EXPECT_THAT(files(),
              UnorderedElementsAre(base(held), base(file), "victim", "rank-0.optimizer.link00",
                                   "rank-0.optimizer.link11", "rank-0.optimizer.longer.name"));
  EXPECT_EQ(std::filesystem::file_size(folder_ + "/victim"), 8U);
}

TEST_F(NvmeFileTest, ADirectoryThatWillNotDoIsRefusedInWords) {
  const auto refusal = [&](const std::string& directory) {
    NvmeFileOptions options = this->options();
    options.directory = directory;
    return error_of([&] { NvmeFile(options, {kBlock}); });
  };
  std::ofstream(folder_ + "/file") << "x";
  EXPECT_THAT(refusal(folder_ + "/none"),
              AllOf(HasSubstr("optimizer state"), HasSubstr("/none"), HasSubstr("No such file")));
  EXPECT_THAT(refusal(folder_ + "/file"), HasSubstr("it is a file; name a directory"));
  EXPECT_THAT(refusal("/dev/shm"), HasSubstr("is on tmpfs, which is host memory"));
  std::filesystem::create_directory(folder_ + "/locked");
  std::filesystem::permissions(folder_ + "/locked", std::filesystem::perms(0555));
  std::thread([&] {
    // Root may write anywhere; this thread is nobody to the file system.
    std::filesystem::permissions(folder_, std::filesystem::perms(0755));
    ::setfsuid(65534);
    EXPECT_THAT(refusal(folder_ + "/locked"),
                AllOf(HasSubstr("cannot be made"), HasSubstr("Permission denied"),
                      HasSubstr("that can be written")));
  }).join();
}

TEST_F(NvmeFileTest, TooLittleRoomIsRefusedWithFiguresBeforeAnythingIsWritten) {
  const auto room = static_cast<int64_t>(std::filesystem::space(folder_).available);
  EXPECT_THAT(error_of([&] {
                NvmeFile(options(), {room, int64_t{1} << 30});
              }),
              AllOf(HasSubstr("too little room"), HasSubstr("expected "), HasSubstr("GiB, got "),
                    HasSubstr("name another directory")));
  EXPECT_THAT(files(), IsEmpty());
}

// For the calling thread and those that it starts, for ever.
void refuse_io_uring() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

TEST_F(NvmeFileTest, ThreadsServeWhereTheKernelRefusesIoUringAndSaySo) {
  std::thread([&] {
    refuse_io_uring();
    NvmeFile file(options(), {4 * kBlock});
    EXPECT_THAT(file.describe(), HasSubstr("threads, as the kernel refuses io_uring (io_uring_setup"
                                           ": Operation not permitted)"));
    write(file, 0, 1);
    EXPECT_TRUE(has(file, 0, 1));
  }).join();
  std::thread([&] {
    refuse_io_uring();
    EXPECT_THAT(error_of([&] { NvmeFile(options(NvmeEngine::kIoUring), {kBlock}); }),
                HasSubstr("the kernel refuses io_uring"));
  }).join();
  EXPECT_THAT(NvmeFile(options(), {kBlock}).describe(), HasSubstr("; io_uring, "));
}

TEST_F(NvmeFileTest, ABufferThatWillNotDoIsRefused) {
  NvmeFile file(options(), {kBlock + 1});
  const at::Tensor buffer = make_buffer(2 * kBlock);
  EXPECT_THAT(error_of([&] { file.start_read(1, buffer); }),
              HasSubstr("expected a record of 0 to 0"));
  EXPECT_THAT(error_of([&] { file.start_read(0, buffer.narrow(0, 0, kBlock + 1)); }),
              HasSubstr("expected 12288 bytes or more, got 8193"));
  EXPECT_THAT(error_of([&] { file.start_read(0, buffer.narrow(0, 1, kBlock + 4096)); }),
              HasSubstr("a multiple of 4096; make_buffer()"));
  EXPECT_THAT(error_of([&] { file.start_write(0, buffer.to(at::kInt)); }), HasSubstr("uint8"));
}

}  // namespace
}  // namespace zeropage::offload::nvme_file_test
