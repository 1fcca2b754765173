// Records that come and go, in a file of one rank that grows as they need: NvmeFile for bytes whose
// number and sizes nobody knows before, such as activations.
//
// A record is written once, read as often as wanted, and its place is free again when its last
// handle and what is in flight on it are gone. A record that the file has no room for is treated like one whose
// write fails (offload/NVME_FORMAT.md).
//
// Lifetime: handles may outlive the heap; they are of no use then.
// Threads: any.
// Throws: as NvmeFile.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "offload/nvme_file.h"
#include "zeropage/detail/pending.h"

namespace zeropage::offload {

class NvmeHeap {
 public:
  using Handle = std::shared_ptr<detail::StoredRecord>;
  struct Put {
    Handle record;
    memory::Pending write;
  };

  // growth_bytes: what the file is preallocated by at once.
  explicit NvmeHeap(const NvmeFileOptions& options, int64_t growth_bytes = int64_t{64} << 20);
  ~NvmeHeap();
  NvmeHeap(const NvmeHeap&) = delete;
  NvmeHeap& operator=(const NvmeHeap&) = delete;

  // buffer: as for NvmeFile, with a multiple of 4096 bytes; the first `bytes` are the record.
  Put start_put(const at::Tensor& buffer, int64_t bytes);
  // Reads the record that was put; its write need not have ended.
  memory::Pending start_get(const Handle& record, const at::Tensor& buffer);

  // Bytes of records that have handles, with their padding.
  int64_t held_bytes() const;
  // What the file takes.
  int64_t file_bytes() const;
  NvmeStatistics statistics() const;
  std::string describe() const;
  const std::string& path() const;

 private:
  struct Extents;

  int64_t take_place(int64_t bytes);

  const int64_t growth_bytes_;
  const std::shared_ptr<Extents> extents_;  // handles have a share
  const std::unique_ptr<detail::RecordStore> store_;
};

}  // namespace zeropage::offload
