// Gives every rank rank 0's buffers (running statistics), a few coalesced broadcasts for the whole
// module.
#pragma once

#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/world.h"

namespace zeropage {

class BufferSync {
 public:
  BufferSync(comm::World world, std::vector<at::Tensor> buffers);

  // Their version counters stay, so that a graph that saved them may still be run backward.
  // Collective; nothing for a module without buffers or a world of one.
  void broadcast_from_rank_zero() const;

 private:
  const comm::World world_;
  std::vector<std::vector<at::Tensor>> alike_;  // in dtype and device
};

}  // namespace zeropage
