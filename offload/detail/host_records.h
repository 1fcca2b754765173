// Records that live in host memory, since a write of them failed.
//
// Threads: the worker's own; the bytes that it counts may be given back by any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "offload/detail/record_counters.h"
#include "offload/detail/record_job.h"
#include "zeropage/ledger.h"

namespace zeropage::offload::detail {

struct HostRecordOptions {
  std::string owner;                          // what the records are, for the warning
  std::optional<int64_t> host_bytes_allowed;  // unset: half of what is available then
  memory::Kind kind = memory::Kind::kOptimizerState;
};

class HostRecords {
 public:
  HostRecords(HostRecordOptions options, std::shared_ptr<RecordCounters> counters)
      : options_(std::move(options)), counters_(std::move(counters)) {}

  // Takes the record of a write that failed from its buffer into host memory; the first one warns.
  // False where there is no room; the job's failure then says so.
  bool take_in(RecordJob& job);
  // The job reads or writes a record that is here already.
  static void read(RecordJob& job);
  static void write(RecordJob& job);

 private:
  bool has_room_for(int64_t bytes) const;

  const HostRecordOptions options_;
  const std::shared_ptr<RecordCounters> counters_;
  bool warned_ = false;
};

}  // namespace zeropage::offload::detail
