#include "offload/record_pipeline.h"

#include <exception>
#include <utility>

#include "memory/check.h"

namespace zeropage::offload {
namespace {

RecordPipeline::Buffers make_buffers(const NvmeFile& file) {
  RecordPipeline::Buffers buffers;
  for (at::Tensor& buffer : buffers) buffer = make_buffer(file.largest_buffer_bytes());
  return buffers;
}

}  // namespace

RecordPipeline::RecordPipeline(NvmeFile& file) : RecordPipeline(file, make_buffers(file)) {}

RecordPipeline::RecordPipeline(NvmeFile& file, Buffers buffers) : file_(file) {
  for (size_t i = 0; i < kPipelineBuffers; ++i) slots_[i].buffer = std::move(buffers[i]);
}

RecordPipeline::~RecordPipeline() {
  wait_quietly();
  for (const Slot& slot : slots_) {
    if (slot.failed) {
      TORCH_WARN(memory::owner_prefix(), "record ", *slot.written, " of ", file_.path(),
                 " could not be written, and its content is given up");
    }
  }
}

void RecordPipeline::prefetch(size_t record) {
  ZP_CHECK(!prefetched_, "RecordPipeline::prefetch of record ", record, ": record ", *prefetched_,
           " has been prefetched already; run() comes first");
  start_read(slot(next_), record);
  prefetched_ = record;
}

void RecordPipeline::run(std::span<const size_t> records, const Compute& compute) {
  if (records.empty()) return;
  if (!prefetched_) prefetch(records.front());
  const size_t prefetched = *std::exchange(prefetched_, std::nullopt);
  ZP_CHECK(prefetched == records.front(), "RecordPipeline::run: record ", prefetched,
           " was prefetched, but the pass begins with ", records.front());
  try {
    for (size_t i = 0; i < records.size(); ++i) {
      const bool is_last = i + 1 == records.size();
      // The same record once more is read behind its write.
      const bool repeats = !is_last && records[i + 1] == records[i];
      if (!is_last && !repeats) start_read(slot(next_ + 1), records[i + 1]);
      Slot& here = slot(next_);
      here.read.wait();
      compute(records[i], here.buffer.narrow(0, 0, file_.record_bytes(records[i])));
      start_write(here, records[i]);
      if (repeats) start_read(slot(next_ + 1), records[i + 1]);
      ++next_;
    }
  } catch (...) {
    wait_quietly();
    throw;
  }
}

void RecordPipeline::finish() {
  for (Slot& slot : slots_) settle(slot);
}

void RecordPipeline::start_read(Slot& slot, size_t record) {
  settle(slot);
  slot.read = file_.start_read(record, slot.buffer);
}

void RecordPipeline::start_write(Slot& slot, size_t record) {
  slot.write = file_.start_write(record, slot.buffer);
  slot.written = record;
}

// The buffer is free afterwards.
void RecordPipeline::settle(Slot& slot) {
  if (!slot.written) return;
  if (slot.failed) start_write(slot, *slot.written);
  slot.failed = true;
  slot.write.wait();
  slot.failed = false;
  slot.written.reset();
}

// What has failed is noted, and thrown by the call that comes next.
void RecordPipeline::wait_quietly() {
  for (Slot& slot : slots_) {
    try {
      slot.read.synchronize();
    } catch (const std::exception&) {
      // Whoever needed it has been told, or nobody did.
    }
    if (!slot.written || slot.failed) continue;
    try {
      settle(slot);
    } catch (const std::exception&) {
      slot.failed = true;
    }
  }
}

}  // namespace zeropage::offload
