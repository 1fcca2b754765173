// The thread that moves records between buffers and a file, block by block, and checks them.
//
// Operations on one record follow each other in the order of start(); different records share the
// device in turn. A block is what is transferred, tried again and checked at once.
//
// Lifetime: the destructor ends what was started. The descriptor behind the device outlives it.
// Threads: start() and statistics() are anybody's; records belong to the worker's thread once given.
// Throws: what goes wrong with an operation is thrown by its Pending.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include "device/pending.h"
#include "memory/ledger.h"
#include "offload/detail/block_device.h"
#include "offload/nvme_options.h"

namespace zeropage::offload::detail {

struct StoredRecord {
  enum class State : uint8_t {
    kEmpty,  // never written
    kOnDevice,
    kOnHost,
    kLost,  // a write of it failed half way, and nothing took it in
  };

  std::string name;    // in messages
  int64_t offset = 0;  // -1: the file has no place for it
  int64_t bytes = 0;

  // Owned by the worker's thread.
  State state = State::kEmpty;
  uint64_t writes = 0;              // that began: the sequence number of the last
  std::vector<uint64_t> checksums;  // of the blocks of the last write
  std::vector<uint64_t>
      earlier_checksums;             // of the write before, to name a block that was not written
  at::Tensor host;                   // [bytes] where the state is kOnHost
  std::shared_ptr<void> host_share;  // ends, with the record, what the worker counts of it
  std::string failure;               // of kLost

  int64_t buffer_bytes() const;
};

struct WorkerOptions {
  std::string path;
  std::string owner;
  int64_t block_bytes = 0;
  bool direct = false;
  std::optional<int64_t> host_bytes_allowed;
  memory::Kind kind = memory::Kind::kOptimizerState;
};

class RecordWorker {
 public:
  RecordWorker(std::unique_ptr<BlockDevice> device, WorkerOptions options);
  ~RecordWorker();
  RecordWorker(const RecordWorker&) = delete;
  RecordWorker& operator=(const RecordWorker&) = delete;

  memory::Pending start(Direction direction, std::shared_ptr<StoredRecord> record,
                        const at::Tensor& buffer);

  NvmeStatistics statistics() const;
  std::string describe() const;

 private:
  struct Job;
  // One transfer in flight.
  struct Slot {
    Job* job = nullptr;
    int64_t block = 0;
    int64_t done = 0;  // bytes
    int failures = 0;
  };

  void serve();
  bool take_jobs();
  void begin_jobs();
  void begin(Job& job);
  void submit_blocks();
  void submit(size_t slot);
  void take_completion(const Completion& completion);
  void end_block(const Slot& slot);
  void end_jobs();
  void end(Job& job);
  void fail_all(const std::string& reason);

  void read_from_host(Job& job);
  void write_to_host(Job& job);
  bool demote(Job& job);
  bool fits_on_host(int64_t bytes) const;
  void verify(Job& job, int64_t block);
  uint64_t checksum(const Job& job, int64_t block);
  int64_t block_begin(int64_t block) const { return block * options_.block_bytes; }
  int64_t transfer_bytes(const Job& job, int64_t block) const;
  std::string describe(const Job& job, int64_t block) const;
  template <typename Change>
  void count(const Change& change);

  // Constant after construction.
  const WorkerOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_;

  // Owned by the worker's thread.
  std::vector<at::Tensor> abandoned_;  // buffers that the device may still use; outlive it
  const std::unique_ptr<BlockDevice> device_;
  std::string broken_;  // why nothing reaches the device any more
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
  std::list<std::unique_ptr<Job>> waiting_;  // for earlier operations on their records
  std::list<std::unique_ptr<Job>> active_;   // the next to submit first
  bool warned_ = false;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::list<std::unique_ptr<Job>> started_;
  NvmeStatistics statistics_;
  bool stopping_ = false;

  // Shared with Pendings and records, which may outlive the worker.
  struct Counters;
  const std::shared_ptr<Counters> counters_;

  std::thread thread_;
};

}  // namespace zeropage::offload::detail
