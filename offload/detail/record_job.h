// One read or write of a record, from start() to its promise.
//
// Threads: the worker's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/detail/block_device.h"
#include "offload/detail/stored_record.h"

namespace zeropage::offload::detail {

struct RecordJob {
  Direction direction = Direction::kRead;
  std::shared_ptr<StoredRecord> record;
  at::Tensor buffer;
  std::promise<void> promise;

  int64_t blocks = 0;      // to transfer
  int64_t next_block = 0;  // to submit
  int64_t in_flight = 0;
  std::vector<uint64_t> checksums;  // of a write's blocks
  std::string failure;              // the first

  std::byte* data() const { return static_cast<std::byte*>(buffer.mutable_data_ptr()); }
  bool has_ended() const { return in_flight == 0 && (next_block == blocks || !failure.empty()); }
  void fail(std::string reason) {
    if (failure.empty()) failure = std::move(reason);
  }
};

}  // namespace zeropage::offload::detail
