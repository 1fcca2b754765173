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
// backward. Tensors of one storage share it, as in activation_offload.h; what never leaves there
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
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "zeropage/pending.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing {

namespace detail {
class Partitioner;
}

// The ranks that share, and how they gather.
struct SliceGroup {
  int index = 0;  // this rank's in the group
  int size = 1;
  // whole_flat: [slice * size], contiguous, of any type; elements [index * slice, (index + 1) *
  // slice) are this rank's, and the others become theirs. name: for errors and traces.
  std::function<memory::Pending(const at::Tensor& whole_flat, const std::string& name)> all_gather;
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
  std::function<bool(const at::Tensor& saved)> held_by_all;
  int64_t least_bytes = int64_t{16} << 10;  // smaller ones stay whole
  Verify verify = Verify::kNo;
  // Hooks that slices and uncut tensors are passed to, such as ActivationOffload::hooks(). Null: they stay.
  std::shared_ptr<SavedTensorHooks> onward = nullptr;
};

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
