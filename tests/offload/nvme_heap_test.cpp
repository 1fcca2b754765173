#include "offload/nvme_heap.h"

#include <cerrno>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/faulty_device.h"

namespace zeropage::offload::nvme_heap_test {
namespace {

using ::testing::HasSubstr;
using zeropage::testing::DeviceScript;
using zeropage::testing::error_of;
using zeropage::testing::faulty;

class NvmeHeapTest : public ::testing::Test {
 protected:
  NvmeHeapTest() {
    options_ = {.directory = folder_,
                .name = "rank-0.activations",
                .owner = "activations",
                .block_bytes = 8192,
                .kind = memory::Kind::kActivationOffloaded};
  }

  static at::Tensor filled(int64_t bytes, int64_t value) {
    return make_buffer((bytes + 4095) / 4096 * 4096).fill_(value & 0xFF);
  }
  static bool has(NvmeHeap& heap, const NvmeHeap::Handle& record, int64_t bytes, int64_t value) {
    const at::Tensor buffer = filled(bytes, ~value);
    heap.start_get(record, buffer).wait();
    return buffer.narrow(0, 0, bytes).eq(value & 0xFF).all().item<bool>();
  }

  const zeropage::testing::DiskFolder disk_;
  const std::string folder_ = disk_.path();
  NvmeFileOptions options_;
};

TEST_F(NvmeHeapTest, GivesBackWhatWasPutWhilePlacesComeAndGo) {
  struct Held {
    NvmeHeap::Handle record;
    int64_t bytes;
    int64_t value;
  };
  NvmeHeap heap(options_, /*growth_bytes=*/65536);
  std::deque<Held> held;
  std::mt19937 random(7);
  int64_t most_held = 0;
  for (int64_t i = 0; i < 300; ++i) {
    const int64_t bytes = 1 + static_cast<int64_t>(random() % 30000);
    held.push_back({heap.start_put(filled(bytes, i), bytes).record, bytes, i});
    most_held = std::max(most_held, heap.held_bytes());
    if (held.size() < 8) continue;
    const size_t gone = random() % held.size();
    EXPECT_TRUE(has(heap, held[gone].record, held[gone].bytes, held[gone].value));
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(gone));
  }
  for (const Held& one : held) EXPECT_TRUE(has(heap, one.record, one.bytes, one.value));
  // Places are used again: without that 300 records would take 4.5 MB.
  EXPECT_LE(heap.file_bytes(), 2 * most_held + 2 * 65536);
  held.clear();
  EXPECT_EQ(heap.held_bytes(), 0);
}

TEST_F(NvmeHeapTest, APlaceIsNotGivenToAnotherWhileItIsWritten) {
  const auto script = std::make_shared<DeviceScript>();
  script->delay = std::chrono::milliseconds(2);
  const detail::WrappedDisk disk(folder_, faulty(script));
  NvmeHeap heap(options_, 8192);
  heap.start_put(filled(80000, 1), 80000);  // given up while it is on its way
  const auto second = heap.start_put(filled(80000, 2), 80000).record;
  EXPECT_TRUE(has(heap, second, 80000, 2));
  const auto third = heap.start_put(filled(80000, 3), 80000).record;
  EXPECT_TRUE(has(heap, third, 80000, 3));
  EXPECT_TRUE(has(heap, second, 80000, 2));
}

TEST_F(NvmeHeapTest, WhatTheDeviceRefusesLivesOnTheHostWhileItIsHeld) {
  const auto script = std::make_shared<DeviceScript>();
  script->faults = {{.direction = detail::Direction::kWrite, .count = 1000, .error = ENOSPC}};
  const detail::WrappedDisk disk(folder_, faulty(script));
  options_.host_bytes_allowed = 10000;
  NvmeHeap heap(options_);
  for (int64_t i = 0; i < 5; ++i) {
    const auto put = heap.start_put(filled(10000, i), 10000);
    EXPECT_TRUE(has(heap, put.record, 10000, i));
    EXPECT_EQ(heap.statistics().demoted_bytes, 10000);
    const auto more = heap.start_put(filled(1, i), 1);
    EXPECT_THAT(error_of([&] { more.write.wait(); }), HasSubstr("does not fit into host memory"));
    EXPECT_THAT(error_of([&] { has(heap, more.record, 1, i); }),
                HasSubstr("its last write failed"));
  }
}

TEST_F(NvmeHeapTest, WhereThereIsLittleRoomTheFileGrowsByTheRecordAlone) {
  options_.host_bytes_allowed = 0;
  NvmeHeap heap(options_, int64_t{1} << 50);
  // The heap may grow by two sizes; the record's own fits.
  EXPECT_TRUE(has(heap, heap.start_put(filled(5000, 1), 5000).record, 5000, 1));
  EXPECT_EQ(heap.file_bytes(), 8192);
}

}  // namespace
}  // namespace zeropage::offload::nvme_heap_test
