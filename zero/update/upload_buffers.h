// Two buffers of the host from which new values go up to the device: one is written to while the other
// one is read.
//
// Threads: one.
#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/TensorBody.h>

#include "zero/tiers/tier_storage.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

class UploadBuffers {
 public:
  struct Buffer {
    at::Tensor memory;   // bytes
    memory::Pending up;  // reads it
  };

  // Another one than the last time, once what it had is up. It has memory of `storage` from its first use
  // on. bytes: of the largest values that will be put there.
  Buffer& next(int64_t bytes, TierStorage& storage);

 private:
  std::array<Buffer, 2> buffers_;
  size_t given_ = 0;
};

}  // namespace zeropage::zero
