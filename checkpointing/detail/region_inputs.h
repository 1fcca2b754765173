// The inputs of a region, kept for its repetition.
//
// Lifetime: shares their memory, or what the hooks around the region made of them.
// Threads: one at a time.
// Throws: c10::Error, where an input was changed in place after the region.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {

class RegionInputs {
 public:
  // who: begins errors.
  void keep(const at::Tensor& tensor, const std::string& name, const std::string& who);
  // The first run has ended: what it has written to its inputs is theirs.
  void end_forward();

  void check_unchanged(const std::string& who) const;
  // A repetition begins.
  void rewind() { next_ = 0; }
  at::Tensor next();

 private:
  struct Input {
    std::string name;
    std::unique_ptr<PackedTensor> packed;  // null for an undefined tensor
    at::Tensor checked;                    // shares the input's version; undefined if hooks took it
    uint32_t version = 0;
    bool requires_grad = false;
    bool is_leaf = true;
  };

  const std::shared_ptr<SavedTensorHooks> enclosing_ = SavedTensorScope::current();
  std::vector<Input> inputs_;
  size_t next_ = 0;
};

}  // namespace zeropage::checkpointing::detail
