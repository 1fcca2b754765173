#include "offload/detail/host_records.h"

#include <cstring>

#include <ATen/ops/empty.h>

#include "offload/detail/host_room.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::offload::detail {

void HostRecords::read(RecordJob& job) {
  std::memcpy(job.data(), job.record->host.const_data_ptr(),
              static_cast<size_t>(job.record->bytes));
}

void HostRecords::write(RecordJob& job) {
  std::memcpy(job.record->host.mutable_data_ptr(), job.data(),
              static_cast<size_t>(job.record->bytes));
}

bool HostRecords::take_in(RecordJob& job) {
  StoredRecord& record = *job.record;
  if (!has_room_for(record.bytes)) {
    job.failure += c10::str("; the record (", memory::format_bytes(record.bytes),
                            ") does not fit into host memory either; its buffer has it still. Free "
                            "room or name another directory, and write it again");
    return false;
  }
  try {
    const memory::KindScope kind(options_.kind);
    record.host = at::empty({record.bytes}, at::kByte);
  } catch (const std::exception& error) {
    job.failure += c10::str("; no host memory for it: ", memory::message_of(error));
    return false;
  }
  write(job);
  record.state = StoredRecord::State::kOnHost;
  counters_->host_bytes += record.bytes;
  record.host_share = {nullptr, [counters = counters_, bytes = record.bytes](void*) {
                         counters->host_bytes -= bytes;
                       }};
  counters_->count([](NvmeStatistics& so_far) { ++so_far.demoted_records; });
  if (!std::exchange(warned_, true)) {
    TORCH_WARN(memory::owner_prefix(), options_.owner, ": ", job.failure,
               ". It lives in host memory from now on, as will all others whose write fails");
  }
  return true;
}

bool HostRecords::has_room_for(int64_t bytes) const {
  const int64_t held = counters_->host_bytes;
  if (options_.host_bytes_allowed) return held + bytes <= *options_.host_bytes_allowed;
  return bytes <= available_host_bytes() / 2;
}

}  // namespace zeropage::offload::detail
