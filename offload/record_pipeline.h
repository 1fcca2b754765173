// One pass over records of a file in which reading, computing and writing overlap: while record k is
// computed, k + 1 is read and k - 1 written. Three buffers of the largest record.
//
//   offload::RecordPipeline pipeline(file);
//   pipeline.prefetch(order.front());               // if wanted: beside what comes before the pass
//   pipeline.run(order, [&](size_t record, const at::Tensor& bytes) { step(record, bytes); });
//   pipeline.finish();                              // at the end; the next run() need not wait for it
//
// The last writes of a pass are in flight when run() returns, so that they overlap with what comes
// next. A record is never read before its last write has ended.
//
// When compute throws, its record is not written, what is in flight ends, and run() throws on: each
// record is as it was before or after its step. When a write fails for good its buffer keeps the new
// content: run() or finish() throws, and the next call of either writes it again.
//
// Bytes: 3 x the largest record, kStaging, or the buffers that it was given.
// Lifetime: the file outlives it. The destructor waits for what is in flight; a write that failed
// and that nobody asked about is warned of.
// Threads: one uses it; compute is called there.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "memory/pending.h"
#include "offload/nvme_file.h"

namespace zeropage::offload {

inline constexpr size_t kPipelineBuffers = 3;

class RecordPipeline {
 public:
  using Buffers = std::array<at::Tensor, kPipelineBuffers>;
  // bytes: uint8 [record_bytes(record)], to be changed in place.
  using Compute = std::function<void(size_t record, const at::Tensor& bytes)>;

  explicit RecordPipeline(NvmeFile& file);
  // buffers: each as NvmeFile::start_read wants it for the largest record, such as page-locked ones.
  RecordPipeline(NvmeFile& file, Buffers buffers);
  ~RecordPipeline();
  RecordPipeline(const RecordPipeline&) = delete;
  RecordPipeline& operator=(const RecordPipeline&) = delete;

  // Starts to read what the next run() begins with. Throws if it begins with another.
  void prefetch(size_t record);
  // records: each as often as wanted.
  void run(std::span<const size_t> records, const Compute& compute);
  // Waits for the writes; throws if one failed.
  void finish();

 private:
  struct Slot {
    at::Tensor buffer;
    memory::Pending read;
    memory::Pending write;
    std::optional<size_t> written;  // the record whose write is in flight or failed
    bool failed = false;
  };

  void start_read(Slot& slot, size_t record);
  void start_write(Slot& slot, size_t record);
  void settle(Slot& slot);
  void wait_quietly();
  Slot& slot(size_t place) { return slots_[place % kPipelineBuffers]; }

  NvmeFile& file_;
  std::array<Slot, kPipelineBuffers> slots_;
  size_t next_ = 0;  // the slot of the next record
  std::optional<size_t> prefetched_;
};

}  // namespace zeropage::offload
