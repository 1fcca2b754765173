// The thread that moves records between buffers and a file.
//
// Operations on one record follow each other in the order of start(); different records share the
// device in turn. A write that the device refuses leaves its record in host memory where there is room
// (HostRecords).
//
// Lifetime: the destructor ends what was started. The descriptor behind the device outlives it.
// Threads: start() and statistics() are anybody's; records belong to the worker's thread once given.
// Throws: what goes wrong with an operation is thrown by its Pending.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <ATen/core/Tensor.h>

#include "offload/detail/block_device.h"
#include "offload/detail/block_transfers.h"
#include "offload/detail/host_records.h"
#include "offload/detail/record_counters.h"
#include "offload/detail/started_jobs.h"
#include "offload/detail/stored_record.h"
#include "offload/nvme_options.h"
#include "zeropage/detail/pending.h"
#include "zeropage/ledger.h"

namespace zeropage::offload::detail {

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

  NvmeStatistics statistics() const { return counters_->statistics(); }
  std::string describe() const;

 private:
  void serve();
  void begin_jobs();
  void begin(RecordJob& job);
  void begin_write(RecordJob& job);
  void begin_read(RecordJob& job);
  void end_jobs();
  void end(RecordJob& job);
  void fail_all(const std::string& reason);

  // Constant after construction.
  const WorkerOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<RecordCounters> counters_;

  StartedJobs started_;

  // Owned by the worker's thread.
  BlockTransfers transfers_;
  HostRecords on_host_;
  std::string broken_;  // why nothing reaches the device any more
  RecordJobs waiting_;  // for earlier operations on their records
  RecordJobs active_;   // the next to submit first

  std::thread thread_;
};

}  // namespace zeropage::offload::detail
