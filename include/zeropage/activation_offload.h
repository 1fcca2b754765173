// `ActivationOffload`: saved activations wait in host memory or on NVMe. `PartitionedCheckpoints`: in slices on the ranks of a
// tensor axis.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "zeropage/detail/pending.h"
#include "zeropage/saved_tensors.h"

// Where copies of activations lie from forward to backward, if not in host memory: an interface, so
// that this folder knows no device that keeps bytes. zeropage/activation_offload.h is one.
//
// Lifetime: the hooks of an ActivationOffload share the store, and what graphs hold of it outlives
// the ActivationOffload.
// Threads: any.

namespace zeropage::checkpointing {

// One copy in a store, which gives up its place when it goes.
class StoredActivation {
 public:
  virtual ~StoredActivation() = default;
  // bytes: as they were put: as many, and aligned alike. May be called more than once. The Pending
  // throws what went wrong with the copy; it never gives other bytes.
  virtual memory::Pending start_get(const at::Tensor& bytes) = 0;
};

class ActivationStore {
 public:
  virtual ~ActivationStore() = default;
  // What the addresses and sizes of tensors that it is given must be multiples of.
  virtual int64_t alignment() const = 0;
  // bytes: uint8 on the host, which nobody writes any more, kept alive for as long as need be. May
  // block, so that what is on its way stays bounded.
  virtual std::unique_ptr<StoredActivation> put(const at::Tensor& bytes) = 0;
  // For statistics: "in /mnt/nvme/rank-3.activations".
  virtual std::string describe() const = 0;
};

// What an ActivationOffload may be asked for, and what it has done (zeropage/activation_offload.h).
// How activations are kept on the host. All but kNone change gradients.
enum class Compression : uint8_t {
  kNone,  // bit by bit
  kBf16,  // fp32 and fp64 as bfloat16: 2 bytes an element, off by up to 2^-8 of it
  k8Bit,  // all floating types as int8 with an fp32 scale for 256: 1.02 bytes an element, off by
          // up to 1/254 of the largest of its 256
};
std::string_view name(Compression compression);  // "none", "bf16", "8-bit"

struct ActivationOffloadOptions {
  // Saved tensors below stay: a copy of little costs more than it gives.
  int64_t least_bytes = int64_t{1} << 10;
  // The most device memory that is on its way out, and, apart from that, fetched ahead; a larger
  // tensor goes alone. More hides more, and is memory. 0: twice the largest that has left, and at
  // least 64 MiB.
  int64_t staging_bytes = 0;
  // Lossy unless kNone: not the gradients of a run without it.
  Compression compression = Compression::kNone;
  // Where copies lie; null: in host memory. On the host, too, they are then brought back ahead, with
  // staging_bytes of host memory.
  std::shared_ptr<ActivationStore> store = nullptr;
};

struct ActivationOffloadStatistics {
  Compression compression = Compression::kNone;
  int64_t saved_tensors = 0;          // that left
  int64_t copies = 0;                 // that they left in: fewer where they share memory
  std::string where = "on the host";  // or in a store: then host_* count what lies there
  int64_t host_bytes = 0;             // of copies, now
  int64_t host_peak_bytes = 0;        // the most that was
  int64_t host_total_bytes = 0;       // of all copies so far
  int64_t fetched_bytes = 0;          // brought back, as they were before compression
  int64_t fetched_ahead_bytes = 0;  // of them, those that were on their way before they were needed
  int64_t most_leaving_bytes = 0;   // that were on their way out at once; 0 on the host
  int64_t most_ahead_bytes = 0;     // that were fetched ahead at once; 0 on the host
  double waited_seconds = 0;        // of the threads that pack, for earlier copies to end
};
// One line. Says that it is lossy if it is.
std::string to_string(const ActivationOffloadStatistics& statistics);

// Activations on the host from forward to backward, without a change to any module.
//
//   checkpointing::ActivationOffload offload;
//   for (...) {
//     at::Tensor loss;
//     {
//       const checkpointing::ActivationScope forward(offload);
//       loss = criterion(model(input), target);       // what autograd saves leaves
//     }
//     loss.backward();                                // and comes back where a node needs it
//   }
//
// What leaves: strided tensors from least_bytes on, with the memory that they lie in (their extent,
// or all of a storage that they have holes in), once for all tensors that are saved of it. What
// stays is kept as without hooks: leaves that require a gradient and views of them, sharded
// parameters, what stay_here() was told, and what is not a plain tensor. Within or around the scope of
// a Recompute, what that drops does not leave.
//
// On an accelerator a copy runs on a stream of its own to page-locked memory, and the source goes
// when it has ended. Backward brings a tensor back on another stream, and then those that were saved
// before it, as far ahead as staging_bytes allows. On the host the copies run in the caller, when they are needed.
// What the program still holds is not brought back but
// used (only if it is not compressed, so that bits do not depend on time).
//
// With a store (ActivationOffloadOptions) copies are passed from the host to the store, and read ahead of their
// use.
//
// Bytes: copies are kActivationOffloaded on the host, what is brought back kActivation, of the
// ledger that is current where the ActivationOffload is made.
//
// A tensor that was changed in place after it was saved is refused in backward, as without hooks: on
// an accelerator its copy may have been under way. What LibTorch does not count as a change (through
// data(), or another tensor on the same memory) is not seen, and may be taken for the first values.
//
// Lifetime: see zeropage/saved_tensors.h; hooks may outlive it too. A copy goes with the last PackedTensor that needs it:
// when backward has run, or its graph is dropped.
// Threads: any; one thread may pack while another is in backward. Backward of an accelerator runs on
// the streams of its forward, as autograd has it.

namespace detail {
class ActivationOffloader;
}

class ActivationOffload : public ActivationPolicy {
 public:
  // Throws if an option makes no sense.
  explicit ActivationOffload(const ActivationOffloadOptions& options = {});
  ~ActivationOffload() override;
  ActivationOffload(ActivationOffload&&) noexcept;
  ActivationOffload& operator=(ActivationOffload&&) noexcept;

  // For hooks of your own that pass tensors to it, and for PartitionOptions::onward.
  std::shared_ptr<SavedTensorHooks> hooks() const;

  // Names tensors that the program holds anyway and saves without a gradient: frozen parameters, buffers. Tensors
  // that are not named give right results too, but are copied.
  void stay_here(const std::vector<at::Tensor>& tensors);

  ActivationOffloadStatistics statistics() const;

 private:
  std::unique_ptr<Forward> begin_forward() override;

  std::shared_ptr<detail::ActivationOffloader> offloader_;
};

namespace detail {
class Partitioner;
}

// The ranks that share, and how they gather.
struct SliceGroup {
  int index = 0;  // this rank's in the group
  int size = 1;
  // whole_flat: [slice * size], contiguous, of any type; elements [index * slice, (index + 1) *
  // slice) are this rank's, and the others become theirs. name: for errors and traces.
  std::function<memory::Pending(const at::Tensor& whole_flat, const std::string& name)> all_gather =
      {};
};

// Whether the members compare their values.
enum class Verify : uint8_t {
  kNo,
  kEachTensor,  // one all-gather of 8 bytes a rank and a pass over the bytes, for each that is cut
};

struct PartitionOptions {
  SliceGroup group;
  // Whether every member of the group holds the same values in this saved tensor, as for what is
  // replicated over a tensor-parallel group: the inputs of its blocks, not what lies between a
  // column-parallel and a row-parallel layer. Must answer alike on all of them. No default: a wrong
  // yes is a wrong gradient.
  std::function<bool(const at::Tensor& saved)> held_by_all = {};
  int64_t least_bytes = int64_t{16} << 10;  // smaller ones stay whole
  Verify verify = Verify::kNo;
  // Hooks that slices and uncut tensors are passed to, such as ActivationOffload::hooks(). Null: they stay.
  std::shared_ptr<SavedTensorHooks> onward = nullptr;
};

// Activations that ranks hold alike, cut into slices: each rank of a tensor-parallel group keeps one
// from forward to backward, and the group gathers them where backward needs the whole.
// (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
// section 6.1, P_a; Megatron's partition_activations.)
//
//   checkpointing::PartitionedCheckpoints partitioned({
//       .group = {.index = rank, .size = ranks, .all_gather = gather},
//       .held_by_all = [&](const at::Tensor& saved) { return is_region_input(saved); }});
//   {
//     const checkpointing::ActivationScope forward(partitioned);
//     loss = criterion(model(input), target);
//   }
//   loss.backward();
//
// Bytes a rank: of a tensor of n bytes n / group, rounded up to whole elements, as kActivation; the
// whole as kActivation while it is back. Sent: one all-gather of n bytes for each storage and
// backward. Tensors of one storage share it, as under ActivationOffload; what never leaves there
// stays here too.
//
// Order: all-gathers must meet. So all ranks of the group save the same tensors in the same order,
// drop their graphs at the same points, and run backward in the same order. A rank that keeps a graph
// for longer than the others, and reuses the tensors in it, is out of step.
//
// Lifetime: hooks and graphs may outlive it; what all_gather uses must outlive the graphs.
// Threads: as SavedTensorHooks; all_gather is called by the thread that runs backward.
// Errors: those of the gather come out of backward(). A tensor that was changed in place after it was
// saved is refused in backward.
//
// Its scope replaces those around it: PartitionOptions::onward says where slices go.
class PartitionedCheckpoints : public ActivationPolicy {
 public:
  // Throws if the group or the predicate is missing or makes no sense.
  explicit PartitionedCheckpoints(PartitionOptions options);
  ~PartitionedCheckpoints() override;
  PartitionedCheckpoints(PartitionedCheckpoints&&) noexcept;
  PartitionedCheckpoints& operator=(PartitionedCheckpoints&&) noexcept;

  // For hooks of your own that pass tensors to it.
  std::shared_ptr<SavedTensorHooks> hooks() const;

 private:
  std::unique_ptr<Forward> begin_forward() override;

  std::shared_ptr<detail::Partitioner> partitioner_;
};

}  // namespace zeropage::checkpointing

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

namespace zeropage {

namespace offload {
class NvmeHeap;
}

struct NvmeActivationsOptions {
  std::string directory = {};  // exists, on a disk; may be all ranks'
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
