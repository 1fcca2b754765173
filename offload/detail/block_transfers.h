// The blocks of operations that are on their way: given to the device, tried again, and checked when
// they have ended. A block is what is transferred, tried again and checked at once.
//
// Lifetime: jobs outlive the transfers of their blocks.
// Threads: the worker's own.
// Throws: what the device throws where it is broken itself. A transfer that fails fails its job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/detail/block_device.h"
#include "offload/detail/record_counters.h"
#include "offload/detail/started_jobs.h"

namespace zeropage::offload::detail {

class BlockTransfers {
 public:
  // path: of the file, for errors.
  BlockTransfers(std::unique_ptr<BlockDevice> device, std::string path, int64_t block_bytes,
                 std::shared_ptr<RecordCounters> counters);

  int64_t blocks_of(const StoredRecord& record) const;
  bool any() const { return free_slots_.size() < slots_.size(); }

  // Gives the device one block of each operation in turn, as many as it takes at once.
  void submit(RecordJobs& jobs);
  // Waits until one transfer has ended. REQUIRES: any().
  void take_one();
  // The device is broken: what is on its way cannot be known to have ended, so the job's buffer stays.
  void abandon(const RecordJob& job);

  // "io_uring, 16 x 2.0 MiB at once".
  std::string describe() const;

 private:
  // One transfer in flight.
  struct Slot {
    RecordJob* job = nullptr;
    int64_t block = 0;
    int64_t done = 0;  // bytes
    int failures = 0;
  };

  void submit(size_t slot);
  bool may_try_again(const Slot& slot, int64_t result) const;
  void verify(RecordJob& job, int64_t block);
  uint64_t checksum(const RecordJob& job, int64_t block);
  int64_t begin_of(int64_t block) const { return block * block_bytes_; }
  int64_t transfer_bytes(const RecordJob& job, int64_t block) const;
  std::string describe(const RecordJob& job, int64_t block) const;

  // Constant after construction.
  const std::string path_;
  const int64_t block_bytes_;
  const std::shared_ptr<RecordCounters> counters_;

  std::vector<at::Tensor> abandoned_;  // buffers that the device may still use; outlive it
  const std::unique_ptr<BlockDevice> device_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
};

}  // namespace zeropage::offload::detail
