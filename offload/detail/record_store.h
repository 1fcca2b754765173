// A file with the thread that moves records in it: what NvmeFile and NvmeHeap share.
//
// Lifetime: the destructor ends what was started, then the file goes. Records may outlive it.
// Threads: any, but for grow(), which callers order.
// Throws: the constructor what NvmeFile's does; start() where the buffer will not do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "offload/detail/record_worker.h"
#include "offload/detail/scratch_file.h"
#include "offload/nvme_options.h"

namespace zeropage::offload::detail {

class RecordStore {
 public:
  RecordStore(const NvmeFileOptions& options, int64_t bytes);

  memory::Pending start(Direction direction, const std::shared_ptr<StoredRecord>& record,
                        const at::Tensor& buffer);
  // Makes the file longer; false where the directory has no room for it.
  bool grow(int64_t bytes) { return file_.grow(bytes); }

  const std::string& path() const { return file_.path(); }
  NvmeStatistics statistics() const { return worker_.statistics(); }
  // "1.20 GiB; io_uring, 16 x 2.0 MiB at once, O_DIRECT"
  std::string describe() const;

 private:
  ScratchFile file_;
  RecordWorker worker_;  // goes before the file
};

}  // namespace zeropage::offload::detail
