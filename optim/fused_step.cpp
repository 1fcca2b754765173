#include "optim/fused_step.h"

#include <algorithm>
#include <optional>
#include <variant>

#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>

#include "optim/checked_stretch.h"
#include "optim/cpu/fused_step.h"
#include "optim/cpu/packed_step.h"
#include "optim/cuda/current_stream.h"
#include "optim/cuda/fused_step.h"
#include "optim/cuda/packed_step.h"
#include "optim/flat_tensor.h"
#include "optim/packed_tensors.h"
#include "optim/parallel.h"
#include "optim/stretch_list.h"
#include "zeropage/check.h"

namespace zeropage::optim::detail {
namespace {

// The least that is worth a thread of its own.
constexpr int64_t kStepNumelPerThread = 32768;

size_t states_of(const UpdateRule& rule) {
  return std::visit(
      []<typename Rule>(const Rule& /*rule*/) { return static_cast<size_t>(Rule::kStates); }, rule);
}

void step_packed(const UpdateRule& rule, const PackedStretch& stretch, const at::Device& device) {
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    return optim::cuda::packed_step(rule, stretch, optim::cuda::current_stream(device));
  }
  // Threads share no block.
  const int64_t blocks = blocks_of(stretch.first_in_block, stretch.flat.numel);
  parallel_for(blocks, kStepNumelPerThread / kStateBlockNumel, [&](int64_t begin, int64_t end) {
    const auto element = [&](int64_t block) {
      return std::clamp(block * kStateBlockNumel - stretch.first_in_block, int64_t{0},
                        stretch.flat.numel);
    };
    optim::cpu::packed_step(rule, stretch, element(begin), element(end));
  });
}

at::ScalarType dtype_of(StateFormat format) {
  switch (format) {
    case StateFormat::kFp32:
      return at::kFloat;
    case StateFormat::kBf16:
      return at::kBFloat16;
    case StateFormat::k8Bit:
      break;
  }
  return at::kByte;
}

// Stretches one after the other, as if they were one; of a single one nothing is on the heap.
struct Flats {
  c10::SmallVector<FlatStretch, 1> stretches;
  c10::SmallVector<int64_t, 1> ends;  // of each, in elements from the first one's beginning

  int64_t numel() const { return ends.back(); }
};

// visit(i) for each, by several threads.
template <typename Visit>
void for_each_stretch(std::span<const Stretch> stretches, const Visit& visit) {
  constexpr int64_t kStretchesPerThread = 256;
  constexpr size_t kBatch = 16;
  parallel_for(static_cast<int64_t>(stretches.size()), kStretchesPerThread,
               [&](int64_t begin, int64_t end) {
                 const auto last = static_cast<size_t>(end);
                 for (auto i = static_cast<size_t>(begin); i < last; i += kBatch) {
                   const size_t until = std::min(i + kBatch, last);
                   if (stretches.size() > 1) prefetch_tensors(stretches.subspan(i, until - i));
                   for (size_t k = i; k < until; ++k) visit(k);
                 }
               });
}

// All checked, before any is changed.
Flats flats_of(const UpdateRule& rule, std::span<const Stretch> stretches,
               const GradientFactors& factors) {
  Flats flats;
  flats.stretches.resize(stretches.size());
  flats.ends.resize(stretches.size());
  for_each_stretch(stretches, [&](size_t i) {
    check_stretch(stretches[i], states_of(rule));
    check_found_inf(factors, stretches[i].values.device());
    check_one_device(stretches[i], stretches.front());
    // Packed ones take a way of their own, and no elements here.
    if (stretches[i].values.is_meta() || is_packed(stretches[i])) return;
    flats.stretches[i] = flat_of(stretches[i], factors);
  });
  int64_t numel = 0;
  for (size_t i = 0; i < stretches.size(); ++i) flats.ends[i] = numel += flats.stretches[i].numel;
  return flats;
}

// The piece that the elements [begin, ...) of all of them begin in.
template <typename Ends>
size_t first_of(const Ends& ends, int64_t begin) {
  return static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
}

// Elements [begin, end) of all of them.
void step_on_cpu(const UpdateRule& rule, const Flats& flats, int64_t begin, int64_t end) {
  size_t i = first_of(flats.ends, begin);
  while (begin < end) {
    const FlatStretch& flat = flats.stretches[i];
    const int64_t first = flats.ends[i] - flat.numel;
    const int64_t until = std::min(end, flats.ends[i]);
    optim::cpu::fused_step(rule, flat, begin - first, until - first);
    begin = until;
    ++i;
  }
}

// In the order of the device's current stream.
void step_pieces(const UpdateRule& rule, const FlatStretch& flat, const PieceTable& table,
                 const at::Device& device) {
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    void* const stream = optim::cuda::current_stream(device);
    const std::optional<PieceList> list = table.on_device();
    if (list) return optim::cuda::fused_step_of_pieces(rule, flat, *list, stream);
    return optim::cuda::fused_step_of_pieces(rule, flat, table.pieces(), stream);
  }
  visit_types(flat, [&]<typename Gradient, typename Copy>() {
    parallel_for(table.numel(), kStepNumelPerThread, [&](int64_t begin, int64_t end) {
      for (size_t i = first_of(table.ends(), begin); begin < end; ++i) {
        const FlatStretch piece = piece_of<Gradient, Copy>(flat, table.pieces()[i]);
        const int64_t first = table.ends()[i] - piece.numel;
        const int64_t until = std::min(end, table.ends()[i]);
        optim::cpu::fused_step(rule, piece, begin - first, until - first);
        begin = until;
      }
    });
  });
}

void step_all_packed(const UpdateRule& rule, int64_t step, std::span<const Stretch> stretches,
                     const GradientFactors& factors) {
  for (const Stretch& stretch : stretches) {
    if (!is_packed(stretch) || stretch.values.numel() == 0) continue;
    step_packed(rule, packed_of(stretch, flat_of(stretch, factors), step), stretch.values.device());
  }
}

}  // namespace

std::vector<at::Tensor> make_states(const UpdateRule& rule, double initial,
                                    const at::Tensor& values, StateFormat format) {
  check_flat({"make_states", "values"}, values);
  // Refuses instructions that are not there now, rather than in the first step.
  if (values.is_cpu()) optim::cpu::best_instructions();
  std::vector<at::Tensor> states;
  for (size_t i = 0; i < states_of(rule); ++i) {
    const double element = format != StateFormat::k8Bit ? initial
                           : initial == 0               ? 0
                                                        : kTopCode<StateSign::kUnsigned>;
    states.push_back(at::full({values.numel()}, element, values.options().dtype(dtype_of(format))));
  }
  return states;
}

std::vector<at::Tensor> make_scales(const UpdateRule& rule, double initial,
                                    const at::Tensor& values, int64_t first_in_block) {
  check_flat({"make_scales", "values"}, values);
  std::vector<at::Tensor> scales;
  for (size_t i = 0; i < states_of(rule); ++i) {
    scales.push_back(at::full({blocks_of(first_in_block, values.numel())}, initial,
                              values.options().dtype(at::kFloat)));
  }
  return scales;
}

void fused_step(const UpdateRule& rule, int64_t step, std::span<const Stretch> stretches,
                const GradientFactors& factors) {
  if (stretches.empty()) return;
  const Flats flats = flats_of(rule, stretches, factors);
  const at::Device device = stretches.front().values.device();
  if (device.is_meta()) return;
  step_all_packed(rule, step, stretches, factors);
  if (device.is_cpu()) {
    parallel_for(flats.numel(), kStepNumelPerThread,
                 [&](int64_t begin, int64_t end) { step_on_cpu(rule, flats, begin, end); });
  } else if (stretches.size() == 1) {
    const c10::DeviceGuard guard(device);
    optim::cuda::fused_step(rule, flats.stretches.front(), optim::cuda::current_stream(device));
  } else {
    // Nothing is copied to the device: that would wait for its stream.
    for (const StretchList::Alike& alike : alike_of(stretches, at::kCPU)) {
      step_pieces(rule, with_factors(alike.first, factors), alike.pieces, device);
    }
  }
  for_each_stretch(stretches, [&](size_t i) { bump_versions(stretches[i], factors); });
}

void fused_step(const UpdateRule& rule, int64_t step, const StretchList& list,
                const GradientFactors& factors) {
  if (list.stretches().empty()) return;
  const Stretch& first = list.stretches().front();
  const at::Device device = first.values.device();
  check_as_many(first, states_of(rule));
  check_found_inf(factors, device);
  if (device.is_meta()) return;
  step_all_packed(rule, step, list.packed(), factors);
  for (const StretchList::Alike& alike : list.alike()) {
    step_pieces(rule, with_factors(alike.first, factors), alike.pieces, device);
  }
  for (const Stretch& stretch : list.stretches()) bump_versions(stretch, factors);
}

void fused_step(const UpdateRule& rule, const Stretch& stretch, const StretchPieces& pieces,
                const GradientFactors& factors) {
  check_whole(stretch, states_of(rule), pieces.end(), pieces.state_end());
  const at::Device device = stretch.values.device();
  check_found_inf(factors, device);
  if (device.is_meta() || pieces.table().empty()) return;
  step_pieces(rule, flat_of(stretch, factors), pieces.table(), device);
  bump_versions(stretch, factors);
}

}  // namespace zeropage::optim::detail
