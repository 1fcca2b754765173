// Whether a saved tensor still has the values that it had when it was saved: LibTorch does not look
// where hooks pack.
//
// Holds the tensor's version counter, not its memory.
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {

class Unchanged {
 public:
  // who: begins the error; empty: "a saved tensor".
  Unchanged(const at::Tensor& tensor, std::string who)
      : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        sizes_(tensor.sizes().vec()),
        who_(std::move(who)) {}

  uint32_t version() const { return version_; }

  // Throws if it was changed in place since.
  void check() const {
    ZP_CHECK(counter_.current_version() == version_, who_.empty() ? "a saved tensor" : who_.c_str(),
             " of sizes ", at::IntArrayRef(sizes_),
             ": one that backward needs was changed in place since the forward (version ", version_,
             " then, ", counter_.current_version(),
             " now); change a clone, or run backward() before it changes");
  }

 private:
  const c10::VariableVersion counter_;
  const uint32_t version_;
  const std::vector<int64_t> sizes_;
  const std::string who_;
};

}  // namespace zeropage::checkpointing::detail
