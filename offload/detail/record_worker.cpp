#include "offload/detail/record_worker.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <utility>
#include <vector>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::offload::detail {
namespace {

using State = StoredRecord::State;

}  // namespace

RecordWorker::RecordWorker(std::unique_ptr<BlockDevice> device, WorkerOptions options)
    : options_(std::move(options)),
      ledger_(memory::Ledger::current()),
      counters_(std::make_shared<RecordCounters>()),
      transfers_(std::move(device), options_.path, options_.block_bytes, counters_),
      on_host_({.owner = options_.owner,
                .host_bytes_allowed = options_.host_bytes_allowed,
                .kind = options_.kind},
               counters_) {
  counters_->count([&](NvmeStatistics& so_far) { so_far.direct = options_.direct; });
  thread_ = std::thread([this] { serve(); });
}

RecordWorker::~RecordWorker() {
  started_.close();
  thread_.join();
}

memory::Pending RecordWorker::start(Direction direction, std::shared_ptr<StoredRecord> record,
                                    const at::Tensor& buffer) {
  auto job = std::make_unique<RecordJob>();
  job->direction = direction;
  job->record = std::move(record);
  job->buffer = buffer;
  const std::shared_future<void> done = job->promise.get_future().share();
  started_.add(std::move(job));
  return {done, {buffer}, [done, counters = counters_] {
            const auto start = std::chrono::steady_clock::now();
            done.wait();
            counters->waited_nanoseconds +=
                (std::chrono::steady_clock::now() - start) / std::chrono::nanoseconds(1);
          }};
}

std::string RecordWorker::describe() const {
  return c10::str(
      transfers_.describe(), ", ",
      options_.direct ? "O_DIRECT" : "through the page cache, as the file system refuses O_DIRECT");
}

void RecordWorker::serve() {
  const memory::LedgerScope charge(ledger_);
  while (started_.take(waiting_, /*waits=*/active_.empty() && waiting_.empty())) {
    try {
      begin_jobs();
      transfers_.submit(active_);
      if (broken_.empty() && transfers_.any()) transfers_.take_one();
      end_jobs();
    } catch (const std::exception& error) {
      fail_all(memory::message_of(error));
    }
  }
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

void RecordWorker::begin(RecordJob& job) {
  job.direction == Direction::kWrite ? begin_write(job) : begin_read(job);
}

void RecordWorker::begin_write(RecordJob& job) {
  StoredRecord& record = *job.record;
  ++record.writes;
  if (record.state == State::kOnHost) return HostRecords::write(job);
  if (!broken_.empty()) return job.fail(broken_);
  if (record.offset < 0) {
    return job.fail(c10::str("writing ", record.name, " (", memory::format_bytes(record.bytes),
                             ") of ", options_.path, ": the directory has no room for more"));
  }
  job.blocks = transfers_.blocks_of(record);
  job.checksums.resize(static_cast<size_t>(job.blocks));
}

void RecordWorker::begin_read(RecordJob& job) {
  const StoredRecord& record = *job.record;
  switch (record.state) {
    case State::kEmpty:
      return job.fail(c10::str("reading ", record.name, " of ", options_.path,
                               ": it was never written; write it first"));
    case State::kLost:
      return job.fail(c10::str("reading ", record.name, " of ", options_.path,
                               ": its last write failed (", record.failure,
                               "); write it again, or restart from a saved state"));
    case State::kOnHost:
      return HostRecords::read(job);
    case State::kOnDevice:
      if (!broken_.empty()) return job.fail(broken_);
      job.blocks = transfers_.blocks_of(record);
  }
}

void RecordWorker::end_jobs() {
  for (auto next = active_.begin(); next != active_.end();) {
    const auto job = next++;
    if (!(*job)->has_ended()) continue;
    end(**job);
    active_.erase(job);
  }
}

void RecordWorker::end(RecordJob& job) {
  StoredRecord& record = *job.record;
  const bool is_write = job.direction == Direction::kWrite;
  if (is_write && !job.failure.empty() && record.state != State::kOnHost && on_host_.take_in(job)) {
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
    counters_->count([&](NvmeStatistics& so_far) {
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

void RecordWorker::fail_all(const std::string& reason) {
  broken_ = c10::str("the engine of ", options_.path, " broke: ", reason);
  active_.splice(active_.end(), waiting_);
  for (const auto& job : active_) {
    job->fail(broken_);
    transfers_.abandon(*job);
    end(*job);
  }
  active_.clear();
}

}  // namespace zeropage::offload::detail
