// Records of one rank in a file: bytes that are too many for memory, such as the optimizer's states
// of one page each, read and written beside what the caller computes.
//
//   offload::NvmeFile file({.directory = "/mnt/nvme", .name = "rank-3.optimizer"}, record_bytes);
//   at::Tensor buffer = offload::make_buffer(file.largest_buffer_bytes());
//   file.start_write(7, buffer).wait();
//   file.start_read(7, buffer).wait();
//
// offload/NVME_FORMAT.md: what lies where, what is checked, what happens when the device fails. In
// short: a read gives exactly what the last write of the record was given, or throws. A write that
// the device refuses leaves the record in host memory, with a warning, if it fits there, and throws
// otherwise; the buffer has the content still.
//
// Operations on one record happen in the order in which they were started; those on different
// records in any.
//
// Lifetime: the file is scratch, not a saved state: it goes with the object, which waits for what is
// in flight. What a killed process left is taken over by the next with the same name. Pending may
// outlive the NvmeFile.
// Threads: any. One thread of its own moves the bytes and computes checksums.
// Throws: the constructor when the directory is missing, not a directory, not writable,
// in memory (tmpfs, ramfs) or too full, and when a living process has the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/nvme_options.h"
#include "zeropage/detail/pending.h"

namespace zeropage::offload {

namespace detail {
class RecordStore;
struct StoredRecord;
}  // namespace detail

class NvmeFile {
 public:
  // record_bytes: of each record, 0 or more. Preallocates all of them.
  NvmeFile(const NvmeFileOptions& options, const std::vector<int64_t>& record_bytes);
  ~NvmeFile();
  NvmeFile(const NvmeFile&) = delete;
  NvmeFile& operator=(const NvmeFile&) = delete;

  size_t records() const { return records_.size(); }
  int64_t record_bytes(size_t record) const;
  // What a buffer of it needs: its bytes, rounded up to 4096.
  int64_t buffer_bytes(size_t record) const;
  int64_t largest_buffer_bytes() const;

  // buffer: contiguous uint8 on the host, of buffer_bytes(record) or more, at a multiple of 4096.
  // The record is its first record_bytes(record). The Pending keeps the buffer alive; wait() throws
  // what went wrong.
  //
  // The record as it was last written. Throws also if it never was.
  memory::Pending start_read(size_t record, const at::Tensor& buffer);
  // The buffer must not change until the Pending is done.
  memory::Pending start_write(size_t record, const at::Tensor& buffer);

  NvmeStatistics statistics() const;
  // "/mnt/nvme/rank-3.optimizer: 12 records, 1.20 GiB; io_uring, 16 x 2.0 MiB at once, O_DIRECT".
  std::string describe() const;
  const std::string& path() const;
  // Where the record lies in the file, in bytes.
  int64_t offset(size_t record) const;

 private:
  const detail::StoredRecord& at(size_t record, const char* verb) const;

  std::vector<std::shared_ptr<detail::StoredRecord>> records_;
  int64_t largest_buffer_bytes_ = 0;
  std::unique_ptr<detail::RecordStore> store_;
};

}  // namespace zeropage::offload
