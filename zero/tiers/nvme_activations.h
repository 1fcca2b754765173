// Activations of one rank in a file, from forward to backward:
//
//   checkpointing::ActivationOffloadOptions options;
//   options.store = std::make_shared<NvmeActivations>(
//       NvmeActivationsOptions{.directory = "/mnt/nvme", .rank = world.rank()});
//   checkpointing::ActivationOffload offload(options);
//
// The bits are those of a run without it, or an error; what is checked, and what happens when the
// device fails, is in offload/NVME_FORMAT.md. The file grows as it must, and is gone with the last
// graph that has an activation in it.
//
// Bytes: writing_bytes of host memory for what is on its way to the disk, and what the ActivationOffload reads
// ahead (ActivationOffloadOptions::staging_bytes).
// Threads: any.
// Throws: the constructor, if the directory cannot be used; put(), if an earlier write failed and host memory could
// not take it in either.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "checkpointing/activation_store.h"

namespace zeropage {

namespace offload {
class NvmeHeap;
}

struct NvmeActivationsOptions {
  std::string directory;  // exists, on a disk; may be all ranks'
  int rank = 0;  // of the world: the file is "rank-<rank>.activations." and six random characters
  // The most that is on its way to the disk at once; a larger tensor goes alone.
  int64_t writing_bytes = int64_t{64} << 20;
};

class NvmeActivations final : public checkpointing::ActivationStore {
 public:
  explicit NvmeActivations(const NvmeActivationsOptions& options);

  int64_t alignment() const override;
  std::unique_ptr<checkpointing::StoredActivation> put(const at::Tensor& bytes) override;
  std::string describe() const override;

  // Its records (offload/nvme_heap.h).
  const offload::NvmeHeap& heap() const { return *heap_; }

 private:
  void make_room(int64_t bytes);

  const int64_t writing_bytes_;
  const std::shared_ptr<offload::NvmeHeap> heap_;  // graphs have a share

  std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<std::pair<memory::Pending, int64_t>> writing_;  // with its bytes
  int64_t in_flight_bytes_ = 0;
};

}  // namespace zeropage
