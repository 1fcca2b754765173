#include "offload/record_pipeline.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/faulty_device.h"

namespace zeropage::offload {
namespace {

using detail::Direction;
using detail::Transfer;
using ::testing::HasSubstr;
using zeropage::testing::DeviceScript;
using zeropage::testing::error_of;
using zeropage::testing::faulty;
using Clock = std::chrono::steady_clock;

class RecordPipelineTest : public ::testing::Test {
 protected:
  RecordPipelineTest() {
    std::string pattern = std::filesystem::current_path() / "pipeline-test-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    options_ = {.directory = folder_,
                .name = "rank-0.optimizer",
                .block_bytes = 8192,
                .host_bytes_allowed = 0,
                .wrap = faulty(script_)};
  }
  ~RecordPipelineTest() override { std::filesystem::remove_all(folder_); }

  // Record r is filled with r.
  void make(const std::vector<int64_t>& record_bytes) {
    file_ = std::make_unique<NvmeFile>(options_, record_bytes);
    order_.resize(record_bytes.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    for (const size_t record : order_) {
      const at::Tensor buffer = make_buffer(file_->buffer_bytes(record));
      buffer.fill_(static_cast<int64_t>(record));
      file_->start_write(record, buffer).wait();
    }
    const std::lock_guard lock(script_->mutex);
    script_->submitted.clear();
    script_->reads = script_->writes = 0;
  }

  // What all bytes of the record are; -1 if they differ.
  int64_t value(size_t record) {
    const at::Tensor buffer = make_buffer(file_->buffer_bytes(record));
    file_->start_read(record, buffer).wait();
    const at::Tensor bytes = buffer.narrow(0, 0, file_->record_bytes(record));
    const auto first = bytes[0].item<int64_t>();
    return bytes.eq(first).all().item<bool>() ? first : -1;
  }

  bool was_submitted(Direction direction, size_t record) const {
    const std::lock_guard lock(script_->mutex);
    for (const Transfer& transfer : script_->submitted) {
      const bool here = transfer.offset == file_->offset(record);
      if (here && transfer.direction == direction) return true;
    }
    return false;
  }
  // False after 10 s.
  bool is_submitted_soon(Direction direction, size_t record) const {
    const auto start = Clock::now();
    while (!was_submitted(direction, record)) {
      if (Clock::now() - start > std::chrono::seconds(10)) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  static void add_ten(size_t, const at::Tensor& bytes) { bytes.add_(10); }

  const std::shared_ptr<DeviceScript> script_ = std::make_shared<DeviceScript>();
  std::string folder_;
  NvmeFileOptions options_;
  std::unique_ptr<NvmeFile> file_;
  std::vector<size_t> order_;
};

TEST_F(RecordPipelineTest, EachRecordIsReadSteppedAndWrittenOnceAPass) {
  make({20000, 1, 8192, 60000, 4097});
  const NvmeStatistics before = file_->statistics();
  RecordPipeline pipeline(*file_);
  for (int pass = 0; pass < 3; ++pass) {
    if (pass == 2) pipeline.prefetch(0);
    pipeline.run(order_, add_ten);
  }
  pipeline.finish();
  const int64_t state = 20480 + 4096 + 8192 + 61440 + 8192;
  EXPECT_EQ(file_->statistics().bytes_read - before.bytes_read, 3 * state);
  EXPECT_EQ(file_->statistics().bytes_written - before.bytes_written, 3 * state);
  for (const size_t record : order_) EXPECT_EQ(value(record), 30 + static_cast<int64_t>(record));
}

TEST_F(RecordPipelineTest, TheNextIsReadAndTheLastIsWrittenWhileOneIsComputed) {
  make(std::vector<int64_t>(6, 20000));
  RecordPipeline pipeline(*file_);
  pipeline.run(order_, [&](size_t record, const at::Tensor&) {
    if (record + 1 < order_.size()) {
      EXPECT_TRUE(is_submitted_soon(Direction::kRead, record + 1));
    }
    if (record > 0) {
      EXPECT_TRUE(is_submitted_soon(Direction::kWrite, record - 1));
    }
    EXPECT_FALSE(was_submitted(Direction::kWrite, record));
    if (record + 2 < order_.size()) {
      EXPECT_FALSE(was_submitted(Direction::kRead, record + 2));
    }
  });
}

TEST_F(RecordPipelineTest, APassTakesLittleMoreThanTheLongerOfDeviceAndCompute) {
  make(std::vector<int64_t>(12, 8192));
  script_->delay = std::chrono::milliseconds(5);
  RecordPipeline pipeline(*file_);
  const auto seconds_of = [&](const RecordPipeline::Compute& compute) {
    const auto start = Clock::now();
    pipeline.run(order_, compute);
    pipeline.finish();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const auto work = [](size_t, const at::Tensor&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  };
  const double device = seconds_of([](size_t, const at::Tensor&) {});
  const double both = seconds_of(work);
  EXPECT_GE(device, 0.12);
  // One after the other would be 0.12 s more than the device alone.
  EXPECT_LT(both, 1.5 * std::max(device, 0.12));
}

TEST_F(RecordPipelineTest, ARecordTwiceInAPassIsReadBehindItsWrite) {
  make({8192, 8192});
  RecordPipeline pipeline(*file_);
  const std::vector<size_t> order = {0, 0, 1, 0, 1, 1};
  pipeline.run(order, add_ten);
  pipeline.run(order, add_ten);
  pipeline.finish();
  EXPECT_EQ(value(0), 60);
  EXPECT_EQ(value(1), 61);
}

TEST_F(RecordPipelineTest, AnErrorOfComputeLeavesItsRecordUnwrittenAndTheOthersWhole) {
  make(std::vector<int64_t>(5, 20000));
  for (size_t failing = 0; failing < 5; ++failing) {
    RecordPipeline pipeline(*file_);
    const auto error = error_of([&] {
      pipeline.run(order_, [&](size_t record, const at::Tensor& bytes) {
        bytes.add_(10);
        if (record == failing) throw std::runtime_error("no gradient");
      });
    });
    EXPECT_EQ(error, "no gradient");
    for (const size_t record : order_) {
      // Its earlier passes, and this one if it came before.
      const int64_t passes = static_cast<int64_t>(record < failing ? failing - record : 0);
      EXPECT_EQ(value(record), static_cast<int64_t>(record) + 10 * passes);
    }
  }
}

TEST_F(RecordPipelineTest, AWriteThatFailedIsThrownAndWrittenAgainByTheNextCall) {
  options_.queue_depth = 1;  // a transfer that is tried again is the next
  for (int n = 0; n < 5; ++n) {
    make(std::vector<int64_t>(5, 8192));
    script_->faults = {{.direction = Direction::kWrite, .first = n, .count = 2, .error = EIO}};
    std::vector<size_t> stepped;
    RecordPipeline pipeline(*file_);
    const auto step = [&](size_t record, const at::Tensor& bytes) {
      add_ten(record, bytes);
      stepped.push_back(record);
    };
    const auto error = error_of([&] {
      pipeline.run(order_, step);
      pipeline.finish();
    });
    EXPECT_THAT(error, HasSubstr(c10::str("writing record ", n)));
    pipeline.finish();
    for (const size_t record : stepped) EXPECT_EQ(value(record), 10 + static_cast<int64_t>(record));
    EXPECT_GE(stepped.size(), std::min<size_t>(static_cast<size_t>(n) + 2, 5));
    script_->faults.clear();
    file_.reset();
  }
}

TEST_F(RecordPipelineTest, APassBeginsWithWhatWasPrefetched) {
  make({4096, 4096});
  RecordPipeline pipeline(*file_);
  pipeline.prefetch(1);
  EXPECT_THAT(error_of([&] { pipeline.prefetch(0); }), HasSubstr("record 1 has been prefetched"));
  EXPECT_THAT(error_of([&] { pipeline.run(order_, add_ten); }), HasSubstr("begins with 0"));
  pipeline.run(order_, add_ten);
}

}  // namespace
}  // namespace zeropage::offload
