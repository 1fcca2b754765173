#include "offload/detail/record_worker.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/exact.h"
#include "offload/detail/block_checksum.h"
#include "offload/detail/host_room.h"

namespace zeropage::offload::detail {
namespace {

using Clock = std::chrono::steady_clock;
using State = StoredRecord::State;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

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

struct RecordWorker::Job {
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

struct RecordWorker::Counters {
  std::atomic<int64_t> waited_nanoseconds{0};
  std::atomic<int64_t> host_bytes{0};
};

int64_t StoredRecord::buffer_bytes() const {
  return memory::round_up(bytes, kNvmeAlignment);
}

RecordWorker::RecordWorker(std::unique_ptr<BlockDevice> device, WorkerOptions options)
    : options_(std::move(options)),
      ledger_(memory::Ledger::current()),
      device_(std::move(device)),
      slots_(static_cast<size_t>(device_->depth())),
      counters_(std::make_shared<Counters>()) {
  for (size_t slot = slots_.size(); slot > 0; --slot) free_slots_.push_back(slot - 1);
  statistics_.direct = options_.direct;
  thread_ = std::thread([this] { serve(); });
}

RecordWorker::~RecordWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

memory::Pending RecordWorker::start(Direction direction, std::shared_ptr<StoredRecord> record,
                                    const at::Tensor& buffer) {
  auto job = std::make_unique<Job>();
  job->direction = direction;
  job->record = std::move(record);
  job->buffer = buffer;
  const std::shared_future<void> done = job->promise.get_future().share();
  {
    const std::lock_guard lock(mutex_);
    started_.push_back(std::move(job));
  }
  changed_.notify_one();
  return {done, {buffer}, [done, counters = counters_] {
            const auto start = Clock::now();
            done.wait();
            counters->waited_nanoseconds += (Clock::now() - start) / std::chrono::nanoseconds(1);
          }};
}

NvmeStatistics RecordWorker::statistics() const {
  const std::lock_guard lock(mutex_);
  NvmeStatistics statistics = statistics_;
  statistics.waited_seconds = static_cast<double>(counters_->waited_nanoseconds) * 1e-9;
  statistics.demoted_bytes = counters_->host_bytes;
  return statistics;
}

std::string RecordWorker::describe() const {
  return c10::str(
      device_->describe(), ", ", slots_.size(), " x ", memory::format_bytes(options_.block_bytes),
      " at once, ",
      options_.direct ? "O_DIRECT" : "through the page cache, as the file system refuses O_DIRECT");
}

void RecordWorker::serve() {
  const memory::LedgerScope charge(ledger_);
  while (take_jobs()) {
    try {
      begin_jobs();
      submit_blocks();
      if (broken_.empty() && free_slots_.size() < slots_.size()) take_completion(device_->wait());
      end_jobs();
    } catch (const std::exception& error) {
      fail_all(memory::message_of(error));
    }
  }
}

// False when nothing is left and nothing will come.
bool RecordWorker::take_jobs() {
  std::unique_lock lock(mutex_);
  if (active_.empty() && waiting_.empty()) {
    changed_.wait(lock, [this] { return stopping_ || !started_.empty(); });
    if (started_.empty()) return false;
  }
  waiting_.splice(waiting_.end(), started_);
  return true;
}

void RecordWorker::begin_jobs() {
  std::vector<const StoredRecord*> taken;
  for (const auto& job : active_) taken.push_back(job->record.get());
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    const auto job = next++;
    const StoredRecord* record = (*job)->record.get();
    const bool is_free = std::find(taken.begin(), taken.end(), record) == taken.end();
    taken.push_back(record);
    if (!is_free) continue;
    active_.splice(active_.end(), waiting_, job);
    begin(*active_.back());
  }
  end_jobs();
}

void RecordWorker::begin(Job& job) {
  StoredRecord& record = *job.record;
  const int64_t blocks = memory::div_ceil(record.bytes, options_.block_bytes);
  if (job.direction == Direction::kWrite) {
    ++record.writes;
    if (record.state == State::kOnHost) return write_to_host(job);
    if (!broken_.empty()) return job.fail(broken_);
    if (record.offset < 0) {
      return job.fail(c10::str("writing ", record.name, " (", memory::format_bytes(record.bytes),
                               ") of ", options_.path, ": the directory has no room for more"));
    }
    job.blocks = blocks;
    job.checksums.resize(static_cast<size_t>(blocks));
    return;
  }
  switch (record.state) {
    case State::kEmpty:
      return job.fail(c10::str("reading ", record.name, " of ", options_.path,
                               ": it was never written; write it first"));
    case State::kLost:
      return job.fail(c10::str("reading ", record.name, " of ", options_.path,
                               ": its last write failed (", record.failure,
                               "); write it again, or restart from a saved state"));
    case State::kOnHost:
      return read_from_host(job);
    case State::kOnDevice:
      if (!broken_.empty()) return job.fail(broken_);
      job.blocks = blocks;
  }
}

// One block of each operation in turn.
void RecordWorker::submit_blocks() {
  size_t idle = 0;  // operations in a row that had nothing to submit
  while (!free_slots_.empty() && idle < active_.size()) {
    Job& job = *active_.front();
    active_.splice(active_.end(), active_, active_.begin());
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

void RecordWorker::submit(size_t slot) {
  const Slot& at = slots_[slot];
  const int64_t begin = block_begin(at.block) + at.done;
  device_->submit({.direction = at.job->direction,
                   .offset = at.job->record->offset + begin,
                   .data = at.job->data() + begin,
                   .bytes = transfer_bytes(*at.job, at.block) - at.done,
                   .tag = slot});
}

void RecordWorker::take_completion(const Completion& completion) {
  Slot& slot = slots_[completion.tag];
  Job& job = *slot.job;
  const int64_t wanted = transfer_bytes(job, slot.block);
  const int64_t moved = std::max<int64_t>(completion.result, 0);
  count([&](NvmeStatistics& so_far) {
    (job.direction == Direction::kRead ? so_far.bytes_read : so_far.bytes_written) += moved;
  });
  // The rest begins at an aligned place too.
  const int64_t before = slot.done;
  slot.done += moved;
  if (slot.done < wanted) slot.done = slot.done / kNvmeAlignment * kNvmeAlignment;
  if (slot.done < wanted) {
    if (slot.done == before) ++slot.failures;
    const int most = is_interruption(completion.result) ? kMostInterruptions : kMostRetries;
    if (slot.failures <= most && !is_final(completion.result)) {
      if (slot.done == before) count([](NvmeStatistics& so_far) { ++so_far.retries; });
      return submit(completion.tag);
    }
    job.fail(c10::str(describe(job, slot.block), ": ",
                      completion.result < 0 ? std::strerror(static_cast<int>(-completion.result))
                                            : "the device moved nothing",
                      slot.failures > 1 ? ", and so again" : ""));
  } else {
    end_block(slot);
  }
  --job.in_flight;
  slot = {};
  free_slots_.push_back(completion.tag);
}

void RecordWorker::end_block(const Slot& slot) {
  if (slot.job->direction == Direction::kRead) verify(*slot.job, slot.block);
}

void RecordWorker::end_jobs() {
  for (auto next = active_.begin(); next != active_.end();) {
    const auto job = next++;
    if (!(*job)->has_ended()) continue;
    end(**job);
    active_.erase(job);
  }
}

void RecordWorker::end(Job& job) {
  StoredRecord& record = *job.record;
  const bool is_write = job.direction == Direction::kWrite;
  if (is_write && !job.failure.empty() && record.state != State::kOnHost && demote(job)) {
    job.failure.clear();
  } else if (is_write && record.state != State::kOnHost) {
    record.earlier_checksums = std::exchange(record.checksums, std::move(job.checksums));
    record.state = job.failure.empty() ? State::kOnDevice : State::kLost;
    record.failure = job.failure;
  }
  // Whoever waits finds the record's place and the buffer free.
  job.record.reset();
  job.buffer.reset();
  if (job.failure.empty()) {
    count([&](NvmeStatistics& so_far) {
      ++(is_write ? so_far.records_written : so_far.records_read);
    });
    job.promise.set_value();
    return;
  }
  try {
    ZP_THROW(options_.owner, ": ", job.failure);
  } catch (...) {
    job.promise.set_exception(std::current_exception());
  }
}

// The engine itself is broken: what is in flight cannot be known to have ended, so its buffers stay.
void RecordWorker::fail_all(const std::string& reason) {
  broken_ = c10::str("the engine of ", options_.path, " broke: ", reason);
  active_.splice(active_.end(), waiting_);
  for (const auto& job : active_) {
    job->fail(broken_);
    abandoned_.push_back(job->buffer);
    end(*job);
  }
  active_.clear();
  for (Slot& slot : slots_) slot = {};
}

void RecordWorker::read_from_host(Job& job) {
  std::memcpy(job.data(), job.record->host.const_data_ptr(),
              static_cast<size_t>(job.record->bytes));
}

void RecordWorker::write_to_host(Job& job) {
  std::memcpy(job.record->host.mutable_data_ptr(), job.data(),
              static_cast<size_t>(job.record->bytes));
}

bool RecordWorker::demote(Job& job) {
  StoredRecord& record = *job.record;
  if (!fits_on_host(record.bytes)) {
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
  write_to_host(job);
  record.state = State::kOnHost;
  counters_->host_bytes += record.bytes;
  record.host_share = {nullptr, [counters = counters_, bytes = record.bytes](void*) {
                         counters->host_bytes -= bytes;
                       }};
  count([](NvmeStatistics& so_far) { ++so_far.demoted_records; });
  if (!std::exchange(warned_, true)) {
    TORCH_WARN(memory::owner_prefix(), options_.owner, ": ", job.failure,
               ". It lives in host memory from now on, as will all others whose write fails");
  }
  return true;
}

bool RecordWorker::fits_on_host(int64_t bytes) const {
  const int64_t held = counters_->host_bytes;
  if (options_.host_bytes_allowed) return held + bytes <= *options_.host_bytes_allowed;
  return bytes <= available_host_bytes() / 2;
}

void RecordWorker::verify(Job& job, int64_t block) {
  const StoredRecord& record = *job.record;
  const auto index = static_cast<size_t>(block);
  const uint64_t got = checksum(job, block);
  const uint64_t expected = record.checksums[index];
  if (got == expected) return;
  const bool is_stale =
      index < record.earlier_checksums.size() && got == record.earlier_checksums[index];
  job.fail(c10::str(
      describe(job, block), ": expected checksum ", to_hex(expected), " of write ", record.writes,
      ", got ", to_hex(got),
      is_stale ? ", which is the write's before: the device lost one" : ": the bytes have changed",
      ". Nothing of it is used; restart from a saved state, and check the device"));
}

uint64_t RecordWorker::checksum(const Job& job, int64_t block) {
  const auto start = Clock::now();
  const int64_t begin = block_begin(block);
  const uint64_t sum =
      block_checksum(job.data() + begin, std::min(options_.block_bytes, job.record->bytes - begin));
  count([&](NvmeStatistics& so_far) { so_far.checksum_seconds += seconds_since(start); });
  return sum;
}

int64_t RecordWorker::transfer_bytes(const Job& job, int64_t block) const {
  return std::min(options_.block_bytes, job.record->buffer_bytes() - block_begin(block));
}

// reading page 3 of /mnt/nvme/rank-3.optimizer, 2.0 MiB at 6291456 (block 1 of 4)
std::string RecordWorker::describe(const Job& job, int64_t block) const {
  return c10::str(job.direction == Direction::kRead ? "reading " : "writing ", job.record->name,
                  " of ", options_.path, ", ", memory::format_bytes(transfer_bytes(job, block)),
                  " at ", job.record->offset + block_begin(block), " (block ", block, " of ",
                  memory::div_ceil(job.record->bytes, options_.block_bytes), ")");
}

template <typename Change>
void RecordWorker::count(const Change& change) {
  const std::lock_guard lock(mutex_);
  change(statistics_);
}

}  // namespace zeropage::offload::detail
