#include "offload/nvme_heap.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "base/exact.h"
#include "offload/detail/record_store.h"
#include "zeropage/check.h"

namespace zeropage::offload {

using detail::StoredRecord;

// What of the file is free.
struct NvmeHeap::Extents {
  std::mutex mutex;
  // Guarded by mutex.
  std::map<int64_t, int64_t> free;  // offset -> bytes, no two adjacent
  int64_t file_bytes = 0;
  int64_t held_bytes = 0;
  int64_t records = 0;  // so far, for names

  // The first that is large enough; -1 if none is. Under mutex.
  int64_t take(int64_t bytes) {
    const auto found = std::find_if(free.begin(), free.end(),
                                    [bytes](const auto& one) { return one.second >= bytes; });
    if (found == free.end()) return -1;
    const auto [offset, room] = *found;
    free.erase(found);
    if (room > bytes) free.emplace(offset + bytes, room - bytes);
    return offset;
  }

  // Under mutex.
  void give_back(int64_t offset, int64_t bytes) {
    const auto after = free.lower_bound(offset);
    if (after != free.end() && after->first == offset + bytes) {
      bytes += after->second;
      free.erase(after);
    }
    const auto behind = free.lower_bound(offset);
    if (behind != free.begin()) {
      const auto before = std::prev(behind);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free.emplace(offset, bytes);
  }
};

NvmeHeap::NvmeHeap(const NvmeFileOptions& options, int64_t growth_bytes)
    : growth_bytes_(growth_bytes),
      extents_(std::make_shared<Extents>()),
      store_(std::make_unique<detail::RecordStore>(options, 0)) {
  ZP_CHECK(growth_bytes > 0 && growth_bytes % kNvmeAlignment == 0, "NvmeHeap for ", options.owner,
           ": expected growth_bytes to be a multiple of ", kNvmeAlignment, " above 0, got ",
           growth_bytes);
}

NvmeHeap::~NvmeHeap() = default;

// Under the extents' mutex. -1: the directory has no room.
int64_t NvmeHeap::take_place(int64_t bytes) {
  int64_t offset = extents_->take(bytes);
  if (offset >= 0) return offset;
  // The file may have free bytes at its end; those that it grows by follow them.
  const int64_t more = std::max(growth_bytes_, bytes);
  for (const int64_t growth : {more, bytes}) {
    if (!store_->grow(growth)) continue;
    extents_->give_back(extents_->file_bytes, growth);
    extents_->file_bytes += growth;
    return extents_->take(bytes);
  }
  return -1;
}

NvmeHeap::Put NvmeHeap::start_put(const at::Tensor& buffer, int64_t bytes) {
  ZP_CHECK(bytes > 0, "NvmeHeap::start_put into ", path(), ": expected 1 byte or more, got ",
           bytes);
  const int64_t padded = base::round_up(bytes, kNvmeAlignment);
  auto record = std::make_unique<StoredRecord>();
  record->bytes = bytes;
  {
    const std::lock_guard lock(extents_->mutex);
    record->name = c10::str("record ", extents_->records++);
    record->offset = take_place(padded);
    extents_->held_bytes += padded;
  }
  // What is in flight has a share of the record, so its place is not given to another meanwhile.
  Handle handle(record.release(), [extents = extents_, padded](StoredRecord* gone) {
    {
      const std::lock_guard lock(extents->mutex);
      extents->held_bytes -= padded;
      if (gone->offset >= 0) extents->give_back(gone->offset, padded);
    }
    delete gone;
  });
  memory::Pending write = store_->start(detail::Direction::kWrite, handle, buffer);
  return {std::move(handle), std::move(write)};
}

memory::Pending NvmeHeap::start_get(const Handle& record, const at::Tensor& buffer) {
  return store_->start(detail::Direction::kRead, record, buffer);
}

int64_t NvmeHeap::held_bytes() const {
  const std::lock_guard lock(extents_->mutex);
  return extents_->held_bytes;
}

int64_t NvmeHeap::file_bytes() const {
  const std::lock_guard lock(extents_->mutex);
  return extents_->file_bytes;
}

NvmeStatistics NvmeHeap::statistics() const {
  return store_->statistics();
}

std::string NvmeHeap::describe() const {
  return c10::str(path(), ": ", store_->describe());
}

const std::string& NvmeHeap::path() const {
  return store_->path();
}

}  // namespace zeropage::offload
