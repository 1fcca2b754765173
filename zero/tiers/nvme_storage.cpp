#include "zero/tiers/nvme_storage.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "memory/check.h"
#include "memory/exact.h"
#include "memory/storage.h"

namespace zeropage {

NvmeStorage::NvmeStorage(offload::NvmeFileOptions file)
    : ledger_(memory::Ledger::current()), options_(std::move(file)) {}

NvmeStorage::~NvmeStorage() {
  for (const auto& [page, record] : records_) {
    for (const Piece& piece : record.pieces) {
      ledger_->discharge_offloaded(memory::Tier::kNvme, piece.kind,
                                   static_cast<int64_t>(piece.storage.nbytes()));
    }
  }
}

at::Tensor NvmeStorage::add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                            memory::Kind kind) {
  const std::lock_guard lock(mutex_);
  ZP_CHECK(!file_, "the file of ", options_.owner,
           " has its size, and options that change in the middle of a run ask for more state; set "
           "them before the first step, or offload to the host");
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  Record& record = records_[page];
  record.pieces.push_back({memory::storage_without_memory(bytes, c10::kCPU), record.bytes, numel,
                           dtype, initial, kind});
  record.bytes += memory::round_up(bytes, kPieceAlignment);
  ledger_->charge_offloaded(memory::Tier::kNvme, kind, bytes);
  const at::Tensor like = at::empty({numel}, at::TensorOptions(c10::kMeta).dtype(dtype));
  return memory::tensor_in(record.pieces.back().storage, like, /*offset=*/0, dtype);
}

void NvmeStorage::make_file() {
  if (file_) return;
  std::vector<int64_t> bytes;
  for (auto& [page, record] : records_) {
    record.number = bytes.size();
    bytes.push_back(record.bytes);
  }
  file_.emplace(options_, bytes);
}

at::Tensor NvmeStorage::piece_in(const at::Tensor& buffer, const Piece& piece) {
  return buffer.narrow(0, piece.begin, static_cast<int64_t>(piece.storage.nbytes()))
      .view(piece.dtype);
}

at::Tensor NvmeStorage::take_buffer() {
  while (!writing_.empty() &&
         (writing_.front().end.done() ||
          (idle_.empty() && writing_.size() + 1 >= static_cast<size_t>(kBuffers)))) {
    const Writing oldest = std::move(writing_.front());
    writing_.pop_front();
    oldest.end.wait();
    idle_.push_back(oldest.buffer);
  }
  if (idle_.empty()) return offload::make_buffer(file_->largest_buffer_bytes());
  at::Tensor buffer = std::move(idle_.back());
  idle_.pop_back();
  return buffer;
}

void NvmeStorage::start_reading(Record& record) {
  if (record.buffer.defined()) return;
  record.buffer = take_buffer();
  if (record.written) record.reading = file_->start_read(record.number, record.buffer);
}

void NvmeStorage::start_fetch(size_t page) {
  const std::lock_guard lock(mutex_);
  const auto at = records_.find(page);
  if (at == records_.end()) return;
  make_file();
  start_reading(at->second);
}

void NvmeStorage::fetch(size_t page) {
  std::unique_lock lock(mutex_);
  const auto at = records_.find(page);
  if (at == records_.end()) return;
  make_file();
  Record& record = at->second;
  start_reading(record);
  ++record.uses;
  const memory::Pending reading = record.reading;
  lock.unlock();
  reading.wait();
  lock.lock();
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
  Record& record = at->second;
  record.dirty |= use == Use::kWrite;
  if (--record.uses > 0) return;
  record.has_memory = false;
  for (const Piece& piece : record.pieces) {
    memory::drop_memory(*piece.storage.unsafeGetStorageImpl());
  }
  const at::Tensor buffer = std::exchange(record.buffer, {});
  record.reading = {};
  if (!std::exchange(record.dirty, false)) {
    idle_.push_back(buffer);
    return;
  }
  writing_.push_back({buffer, file_->start_write(record.number, buffer)});
  record.written = true;
}

offload::NvmeStatistics NvmeStorage::statistics() const {
  const std::lock_guard lock(mutex_);
  return file_ ? file_->statistics() : offload::NvmeStatistics();
}

int64_t NvmeStorage::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  return file_ ? kBuffers * file_->largest_buffer_bytes() : 0;
}

std::string NvmeStorage::describe() const {
  const std::lock_guard lock(mutex_);
  return file_ ? file_->describe() + "; " + to_string(file_->statistics()) : "";
}

}  // namespace zeropage
