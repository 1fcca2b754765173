// Stretches that are stepped together, again and again, with the bits of single calls of fused_step().
//
//   const offload::StretchList list(stretches);        // checked and made known to the device, once
//   offload::fused_step(options, step, list);          // one launch, or one loop of the CPU's threads
//
// StretchPieces are the same of parts of one stretch, such as the parameters of a page: known by their places, so
// that its buffers may lie elsewhere at each step.
//
// Cost: 72 bytes a stretch, on a CUDA device 64 more, and there 4 for each 2048 elements. A launch is made for
// each combination of dtypes. Stretches with smaller states or split values are stepped one by one.
// Lifetime: a list keeps its tensors and their memory; one that is given other memory later, by set_() or set_data(),
// is stepped where it was. Threads: as fused_step(). Throws as it does.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/piece_table.h"
#include "optim/rules_of_options.h"
#include "optim/stretch.h"

namespace zeropage::optim {

// Elements [begin, begin + numel) of values, gradient and copy_out, and as many of each state from first_state on.
// Both begin alike in 16 elements, or a device takes them one by one.
struct StretchPiece {
  int64_t begin = 0;
  int64_t first_state = 0;
  int64_t numel = 0;
};

class StretchPieces {
 public:
  StretchPieces() = default;
  // They do not overlap. device: of the stretch.
  StretchPieces(const std::vector<StretchPiece>& pieces, const at::Device& device);

  const PieceTable& table() const { return table_; }
  // Behind the last of them, in values and in states.
  int64_t end() const { return end_; }
  int64_t state_end() const { return state_end_; }

 private:
  PieceTable table_;
  int64_t end_ = 0;
  int64_t state_end_ = 0;
};

class StretchList {
 public:
  explicit StretchList(std::vector<Stretch> stretches);

  // Stretches whose buffers have the same dtypes, by their places behind the first one's.
  struct Alike {
    FlatStretch first;
    PieceTable pieces;
  };
  const std::vector<Alike>& alike() const { return alike_; }
  // All of them, and those that are stepped one by one.
  std::span<const Stretch> stretches() const { return stretches_; }
  std::span<const Stretch> packed() const { return packed_; }

 private:
  std::vector<Stretch> stretches_;
  std::vector<Stretch> packed_;
  std::vector<c10::Storage> storages_;
  std::vector<Alike> alike_;
};

// By dtypes. Leaves packed ones out. table_on: that has a copy of their tables, if it is a CUDA device.
// REQUIRES: checked, on one device, not the meta one.
std::vector<StretchList::Alike> alike_of(std::span<const Stretch> stretches,
                                         const at::Device& table_on);

namespace detail {
void fused_step(const UpdateRule& rule, int64_t step, const StretchList& list,
                const GradientFactors& factors);
void fused_step(const UpdateRule& rule, const Stretch& stretch, const StretchPieces& pieces,
                const GradientFactors& factors);
}  // namespace detail

// step: counted from 1.
template <typename Options>
void fused_step(const Options& options, int64_t step, const StretchList& list,
                const GradientFactors& factors = {}) {
  optim::detail::fused_step(rule_of(options, step), step, list, factors);
}

// Pieces of the stretch, whose values are fp32 and whose fp32 states are laid out as the pieces say.
template <typename Options>
void fused_step_of_pieces(const Options& options, int64_t step, const Stretch& stretch,
                          const StretchPieces& pieces, const GradientFactors& factors = {}) {
  optim::detail::fused_step(rule_of(options, step), stretch, pieces, factors);
}

}  // namespace zeropage::optim
