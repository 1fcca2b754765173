#include <type_traits>
#include <variant>

#include "optim/cuda/fused_group.cuh"
#include "optim/cuda/fused_step.h"
#include "optim/cuda/launch.cuh"

namespace zeropage::optim::cuda {
namespace {

// Elements [head, head + kTogether groups) are aligned in every pointer; the others go one by one.
struct Split {
  int64_t head = 0;
  int64_t groups = 0;
};

// Instead of an update, where an infinity was found: one element after the other, as it is rare.
template <typename Gradient>
__device__ __forceinline__ void zero_gradient(const FlatStretch& stretch) {
  if (stretch.gradient_to_zero == nullptr) return;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < stretch.numel;
       i += gridDim.x * int64_t{kThreads}) {
    static_cast<Gradient*>(stretch.gradient_to_zero)[i] = Gradient{};
  }
}

template <typename Rule, typename Gradient, typename Copy>
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ Rule rule, const __grid_constant__ FlatStretch stretch,
           const __grid_constant__ Split split) {
  if (stretch.found_inf != nullptr && *stretch.found_inf != 0.0F) {
    zero_gradient<Gradient>(stretch);
    return;
  }
  using Groups = Group<Rule, Gradient, Copy>;
  constexpr int kGroups = kInFlight / Groups::kCount;
  constexpr int64_t kTile = kThreads * kGroups;
  for (int64_t tile = blockIdx.x * kTile + threadIdx.x; tile < split.groups;
       tile += gridDim.x * kTile) {
    Groups groups[kGroups];
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const int64_t group = tile + k * kThreads;
      if (group < split.groups) groups[k].load_all(stretch, split.head + Groups::kCount * group);
    }
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const int64_t group = tile + k * kThreads;
      if (group < split.groups) {
        groups[k].update_and_store(rule, stretch, split.head + Groups::kCount * group);
      }
    }
  }
  const int64_t grouped = Groups::kCount * split.groups;
  for (int64_t single = blockIdx.x * int64_t{kThreads} + threadIdx.x;
       single < stretch.numel - grouped; single += gridDim.x * int64_t{kThreads}) {
    const int64_t i = single < split.head ? single : single + grouped;
    update_one<Rule, Gradient, Copy>(rule, stretch, i);
  }
}

// A slice of a flat buffer begins anywhere, but at the same element in all of its buffers: then
// all are aligned after the same few elements. If they are not, everything is head.
template <typename Rule, typename Gradient, typename Copy>
Split split_of(const FlatStretch& stretch) {
  constexpr int kCount = kTogether<Gradient, Copy>;
  const auto aligned = [](const auto* pointer) { return is_aligned<kCount>(pointer); };
  for (int64_t head = 0; head < kCount && head < stretch.numel; ++head) {
    bool all = aligned(stretch.values + head) &&
               aligned(static_cast<const Gradient*>(stretch.gradient) + head);
    for (int state = 0; state < Rule::kStates; ++state) {
      all = all && aligned(stretch.states[state] + head);
    }
    if constexpr (!std::is_same_v<Copy, NoCopy>) {
      all = all && aligned(static_cast<const Copy*>(stretch.copy_out) + head);
    }
    if (all) return {.head = head, .groups = (stretch.numel - head) / kCount};
  }
  return {.head = stretch.numel, .groups = 0};
}

}  // namespace

bool is_built() {
  return true;
}

void fused_step(const UpdateRule& rule, const FlatStretch& stretch, void* stream) {
  if (stretch.numel == 0) return;
  std::visit(
      [&]<typename Rule>(const Rule& of_class) {
        visit_types(stretch, [&]<typename Gradient, typename Copy>() {
          constexpr int kCount = kTogether<Gradient, Copy>;
          const Split split = split_of<Rule, Gradient, Copy>(stretch);
          const unsigned blocks =
              std::max(blocks_for(split.groups, kThreads * (kInFlight / kCount)),
                       blocks_for(stretch.numel - kCount * split.groups, kThreads));
          launch({.what = "the launch of a fused step", .blocks = blocks, .stream = stream},
                 update<Rule, Gradient, Copy>, of_class, stretch, split);
        });
      },
      rule);
}

}  // namespace zeropage::optim::cuda
