#include "zero/tiers/nvme_storage.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "base/exact.h"
#include "memory/storage.h"
#include "zeropage/check.h"

namespace zeropage::zero {

NvmeStorage::NvmeStorage(offload::NvmeFileOptions file)
    : ledger_(memory::Ledger::current()), options_(std::move(file)) {}

NvmeStorage::~NvmeStorage() {
  for (const auto& [page, records] : records_) {
    for (const Record& record : records) {
      for (const Piece& piece : record.pieces) {
        ledger_->discharge_offloaded(memory::Tier::kNvme, piece.kind,
                                     static_cast<int64_t>(piece.storage.nbytes()));
      }
    }
  }
}

at::Tensor NvmeStorage::add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                            memory::Kind kind) {
  const std::lock_guard lock(mutex_);
  std::deque<Record>& records = records_[page];
  ZP_CHECK(records.empty() || records.back().uses == 0, "the file of ", options_.owner,
           " has its size, and options that change in the middle of a run ask for more state; set "
           "them before the first step, or offload to the host");
  if (records.empty() || records.back().file != nullptr) records.emplace_back();
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  Record& record = records.back();
  record.pieces.push_back({memory::storage_without_memory(bytes, c10::kCPU), record.bytes, numel,
                           dtype, initial, kind});
  record.bytes += base::round_up(bytes, kPieceAlignment);
  ledger_->charge_offloaded(memory::Tier::kNvme, kind, bytes);
  const at::Tensor like = at::empty({numel}, at::TensorOptions(c10::kMeta).dtype(dtype));
  return memory::tensor_in(record.pieces.back().storage, like, /*offset=*/0, dtype);
}

// Makes a file for all records that are in none.
void NvmeStorage::make_file() {
  std::vector<Record*> placed;
  std::vector<int64_t> bytes;
  for (auto& [page, records] : records_) {
    if (records.back().file != nullptr) continue;
    placed.push_back(&records.back());
    bytes.push_back(records.back().bytes);
  }
  if (placed.empty()) return;
  offload::NvmeFileOptions options = options_;
  if (!files_.empty()) options.name += c10::str("-", files_.size() + 1);
  const int64_t largest_before = largest_buffer_bytes();
  files_.emplace_back(options, bytes);
  for (size_t number = 0; number < placed.size(); ++number) {
    placed[number]->file = &files_.back();
    placed[number]->number = number;
  }
  if (largest_buffer_bytes() > largest_before) idle_.clear();
}

int64_t NvmeStorage::largest_buffer_bytes() const {
  int64_t largest = 0;
  for (const auto& file : files_) largest = std::max(largest, file.largest_buffer_bytes());
  return largest;
}

at::Tensor NvmeStorage::piece_in(const at::Tensor& buffer, const Piece& piece) {
  return buffer.narrow(0, piece.begin, static_cast<int64_t>(piece.storage.nbytes()))
      .view(piece.dtype);
}

// Those of before the largest record are too small.
void NvmeStorage::keep_idle(const at::Tensor& buffer) {
  if (buffer.numel() >= largest_buffer_bytes()) idle_.push_back(buffer);
}

at::Tensor NvmeStorage::take_buffer() {
  while (!writing_.empty() &&
         (writing_.front().end.done() ||
          (idle_.empty() && writing_.size() + 1 >= static_cast<size_t>(kBuffers)))) {
    const Writing oldest = std::move(writing_.front());
    writing_.pop_front();
    oldest.end.wait();
    keep_idle(oldest.buffer);
  }
  if (idle_.empty()) return offload::make_buffer(largest_buffer_bytes());
  at::Tensor buffer = std::move(idle_.back());
  idle_.pop_back();
  return buffer;
}

void NvmeStorage::start_reading(Record& record) {
  if (record.buffer.defined()) return;
  record.buffer = take_buffer();
  if (record.written) record.reading = record.file->start_read(record.number, record.buffer);
}

void NvmeStorage::start_fetch(size_t page) {
  const std::lock_guard lock(mutex_);
  const auto at = records_.find(page);
  if (at == records_.end()) return;
  make_file();
  for (Record& record : at->second) start_reading(record);
}

void NvmeStorage::fetch(size_t page) {
  std::unique_lock lock(mutex_);
  const auto at = records_.find(page);
  if (at == records_.end()) return;
  make_file();
  for (Record& record : at->second) {
    start_reading(record);
    ++record.uses;
  }
  for (Record& record : at->second) {
    const memory::Pending reading = record.reading;
    lock.unlock();
    reading.wait();
    lock.lock();
    give_memory(record);
  }
}

void NvmeStorage::give_memory(Record& record) {
  // Another thread that asked for it may have been quicker.
  if (std::exchange(record.has_memory, true)) return;
  for (const Piece& piece : record.pieces) {
    const at::Tensor memory = piece_in(record.buffer, piece);
    if (!record.written) memory.fill_(piece.initial);
    memory::give_memory(*piece.storage.unsafeGetStorageImpl(), memory);
  }
}

void NvmeStorage::release(size_t page, Use use) {
  const std::lock_guard lock(mutex_);
  const auto at = records_.find(page);
  if (at == records_.end()) return;
  for (Record& record : at->second) release(record, use);
}

void NvmeStorage::release(Record& record, Use use) {
  record.dirty |= use == Use::kWrite;
  if (--record.uses > 0) return;
  record.has_memory = false;
  for (const Piece& piece : record.pieces) {
    memory::drop_memory(*piece.storage.unsafeGetStorageImpl());
  }
  const at::Tensor buffer = std::exchange(record.buffer, {});
  record.reading = {};
  if (!std::exchange(record.dirty, false)) {
    keep_idle(buffer);
    return;
  }
  writing_.push_back({buffer, record.file->start_write(record.number, buffer)});
  record.written = true;
}

int64_t NvmeStorage::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  return kBuffers * largest_buffer_bytes();
}

void NvmeStorage::release_buffers() {
  const std::lock_guard lock(mutex_);
  for (; !writing_.empty(); writing_.pop_front()) writing_.front().end.wait();
  for (auto& [page, records] : records_) {
    for (Record& record : records) {
      if (record.uses > 0) continue;
      // It was read ahead.
      std::exchange(record.reading, {}).wait();
      record.buffer.reset();
    }
  }
  idle_.clear();
}

std::string NvmeStorage::describe() const {
  const std::lock_guard lock(mutex_);
  std::string lines;
  for (const auto& file : files_) {
    lines +=
        c10::str(lines.empty() ? "" : "\n", file.describe(), "; ", to_string(file.statistics()));
  }
  return lines;
}

}  // namespace zeropage::zero
