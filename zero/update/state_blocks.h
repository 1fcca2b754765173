// The memory of a page's optimizer states, where the update is fused: on the device of the values, or in a tier.
//
// States of one format that are made together share a tensor, one parameter behind the other. So many small ones
// take no more than their bytes, and one call of offload::fused_step() finds all of them.
//
// Lifetime: the part outlives it. Threads: that of the update.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/update/page_update.h"

namespace zeropage::zero {

class StateBlocks {
 public:
  explicit StateBlocks(const OwnedPart& part) : part_(part) {}

  // The numbers that one element and one scale of each state begin as: [1] each, on the host.
  struct Beginning {
    std::vector<at::Tensor> states;
    std::vector<at::Tensor> scales = {};  // of 8-bit states
  };
  // Returns the block's number. It has no states yet.
  size_t add(int64_t numel, int64_t scales);
  // Makes those of the states that the block has not yet.
  void extend(size_t block, const Beginning& beginning);

  // Those that are in no tier.
  void visit_memory(const VisitMemory& visit) const {
    if (part_.states != nullptr) return;
    for (const Block& block : blocks_) {
      for (const at::Tensor& of : block.states) visit(of, memory::Kind::kOptimizerState);
      for (const at::Tensor& of : block.scales) visit(of, memory::Kind::kOptimizerState);
    }
  }

  // [numel] each.
  const std::vector<at::Tensor>& states(size_t block) const { return blocks_[block].states; }
  // [scales] each.
  const std::vector<at::Tensor>& scales(size_t block) const { return blocks_[block].scales; }

 private:
  struct Block {
    int64_t numel = 0;
    int64_t scales_numel = 0;
    std::vector<at::Tensor> states = {};
    std::vector<at::Tensor> scales = {};
  };

  at::Tensor made(const at::Tensor& beginning, int64_t numel) const;

  const OwnedPart& part_;
  std::vector<Block> blocks_;
};

}  // namespace zeropage::zero
