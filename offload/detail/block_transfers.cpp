#include "offload/detail/block_transfers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/block_checksum.h"
#include "base/exact.h"
#include "zeropage/bytes.h"

namespace zeropage::offload::detail {
namespace {

// How often a block is tried again after an error, and after a transfer that moved nothing.
constexpr int kMostRetries = 1;
// The kernel asks for these to be tried again: often, but not for ever.
constexpr int kMostInterruptions = 1000;

bool is_interruption(int64_t result) {
  return result == -EINTR || result == -EAGAIN;
}

// Room does not come by asking again.
bool is_final(int64_t result) {
  return result == -ENOSPC || result == -EDQUOT || result == -EROFS;
}

}  // namespace

BlockTransfers::BlockTransfers(std::unique_ptr<BlockDevice> device, std::string path,
                               int64_t block_bytes, std::shared_ptr<RecordCounters> counters)
    : path_(std::move(path)),
      block_bytes_(block_bytes),
      counters_(std::move(counters)),
      device_(std::move(device)),
      slots_(static_cast<size_t>(device_->depth())) {
  for (size_t slot = slots_.size(); slot > 0; --slot) free_slots_.push_back(slot - 1);
}

int64_t BlockTransfers::blocks_of(const StoredRecord& record) const {
  return base::div_ceil(record.bytes, block_bytes_);
}

void BlockTransfers::submit(RecordJobs& jobs) {
  size_t idle = 0;  // operations in a row that had nothing to submit
  while (!free_slots_.empty() && idle < jobs.size()) {
    RecordJob& job = *jobs.front();
    jobs.splice(jobs.end(), jobs, jobs.begin());
    if (job.next_block == job.blocks || !job.failure.empty()) {
      ++idle;
      continue;
    }
    idle = 0;
    const size_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = {.job = &job, .block = job.next_block++};
    ++job.in_flight;
    if (job.direction == Direction::kWrite) {
      const int64_t block = slots_[slot].block;
      job.checksums[static_cast<size_t>(block)] = checksum(job, block);
    }
    submit(slot);
  }
}

void BlockTransfers::submit(size_t slot) {
  const Slot& at = slots_[slot];
  const int64_t begin = begin_of(at.block) + at.done;
  device_->submit({.direction = at.job->direction,
                   .offset = at.job->record->offset + begin,
                   .data = at.job->data() + begin,
                   .bytes = transfer_bytes(*at.job, at.block) - at.done,
                   .tag = slot});
}

void BlockTransfers::take_one() {
  const Completion completion = device_->wait();
  Slot& slot = slots_[completion.tag];
  RecordJob& job = *slot.job;
  const int64_t wanted = transfer_bytes(job, slot.block);
  const int64_t moved = std::max<int64_t>(completion.result, 0);
  counters_->count([&](NvmeStatistics& so_far) {
    (job.direction == Direction::kRead ? so_far.bytes_read : so_far.bytes_written) += moved;
  });
  // The rest begins at an aligned place too.
  const int64_t before = slot.done;
  slot.done += moved;
  if (slot.done < wanted) slot.done = slot.done / kNvmeAlignment * kNvmeAlignment;
  if (slot.done < wanted) {
    if (slot.done == before) ++slot.failures;
    if (may_try_again(slot, completion.result)) {
      if (slot.done == before) {
        counters_->count([](NvmeStatistics& so_far) { ++so_far.retries; });
      }
      return submit(completion.tag);
    }
    job.fail(c10::str(describe(job, slot.block), ": ",
                      completion.result < 0 ? std::strerror(static_cast<int>(-completion.result))
                                            : "the device moved nothing",
                      slot.failures > 1 ? ", and so again" : ""));
  } else if (job.direction == Direction::kRead) {
    verify(job, slot.block);
  }
  --job.in_flight;
  slot = {};
  free_slots_.push_back(completion.tag);
}

bool BlockTransfers::may_try_again(const Slot& slot, int64_t result) const {
  const int most = is_interruption(result) ? kMostInterruptions : kMostRetries;
  return slot.failures <= most && !is_final(result);
}

void BlockTransfers::abandon(const RecordJob& job) {
  abandoned_.push_back(job.buffer);
  for (Slot& slot : slots_) {
    if (slot.job == &job) slot = {};
  }
}

std::string BlockTransfers::describe() const {
  return c10::str(device_->describe(), ", ", slots_.size(), " x ",
                  memory::format_bytes(block_bytes_), " at once");
}

void BlockTransfers::verify(RecordJob& job, int64_t block) {
  const StoredRecord& record = *job.record;
  const auto index = static_cast<size_t>(block);
  const uint64_t got = checksum(job, block);
  const uint64_t expected = record.checksums[index];
  if (got == expected) return;
  const bool is_stale =
      index < record.earlier_checksums.size() && got == record.earlier_checksums[index];
  job.fail(c10::str(
      describe(job, block), ": expected checksum ", base::to_hex(expected), " of write ",
      record.writes, ", got ", base::to_hex(got),
      is_stale ? ", which is the write's before: the device lost one" : ": the bytes have changed",
      ". Nothing of it is used; restart from a saved state, and check the device"));
}

uint64_t BlockTransfers::checksum(const RecordJob& job, int64_t block) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t begin = begin_of(block);
  const uint64_t sum =
      base::block_checksum(job.data() + begin, std::min(block_bytes_, job.record->bytes - begin));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  counters_->count([&](NvmeStatistics& so_far) { so_far.checksum_seconds += seconds.count(); });
  return sum;
}

int64_t BlockTransfers::transfer_bytes(const RecordJob& job, int64_t block) const {
  return std::min(block_bytes_, job.record->buffer_bytes() - begin_of(block));
}

// reading page 3 of /mnt/nvme/rank-3.optimizer, 2.0 MiB at 6291456 (block 1 of 4)
std::string BlockTransfers::describe(const RecordJob& job, int64_t block) const {
  return c10::str(job.direction == Direction::kRead ? "reading " : "writing ", job.record->name,
                  " of ", path_, ", ", memory::format_bytes(transfer_bytes(job, block)), " at ",
                  job.record->offset + begin_of(block), " (block ", block, " of ",
                  blocks_of(*job.record), ")");
}

}  // namespace zeropage::offload::detail
