// Who holds activations: live blocks by the operator that made them, for errors about memory.
//
// Not thread-safe: the ledger's mutex guards it. Cost: an entry of a table for each live block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "memory/operator_label.h"

namespace zeropage::memory {

class AllocationOwners {
 public:
  // By the calling thread's operator. block: tells live blocks apart.
  void take(const void* block, int64_t bytes);
  void free(const void* block) { blocks_.erase(block); }
  // The largest first, a line each: "  head: aten::linear in forward: 32.0 MiB in 1". "" where nothing is known.
  std::string describe(size_t most) const;

 private:
  struct Block {
    int64_t bytes;
    OperatorLabel label;
  };

  std::unordered_map<const void*, Block> blocks_;
};

// "head: aten::linear", "after blocks.3.up: aten::gelu"; "" where no operator runs.
std::string describe(const OperatorLabel& label);
// "forward", "the loss", "backward"; "" for none.
std::string name(StepPhase phase);

}  // namespace zeropage::memory
