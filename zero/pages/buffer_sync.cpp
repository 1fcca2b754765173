#include "zero/pages/buffer_sync.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "operators/operator_interceptor.h"
#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage {

BufferSync::BufferSync(comm::World world, std::vector<at::Tensor> buffers)
    : world_(std::move(world)) {
  for (at::Tensor& buffer : buffers) {
    const auto alike = std::find_if(alike_.begin(), alike_.end(), [&](const auto& group) {
      return group.front().scalar_type() == buffer.scalar_type() &&
             group.front().device() == buffer.device();
    });
    if (alike != alike_.end()) {
      alike->push_back(std::move(buffer));
    } else {
      alike_.push_back({std::move(buffer)});
    }
  }
}

void BufferSync::broadcast_from_rank_zero() const {
  if (world_.size() == 1) return;
  const at::NoGradGuard no_grad;
  // Rank 0 writes nothing here, and whoever records a forward must see the same one on all ranks.
  const memory::InterceptorScope unseen(nullptr);
  for (const auto& buffers : alike_) {
    const memory::KindScope kind(memory::Kind::kStaging);
    std::vector<at::Tensor> flattened;
    for (const at::Tensor& buffer : buffers) flattened.push_back(buffer.reshape({-1}));
    const at::Tensor together = at::cat(flattened);
    const memory::OwnerScope owner("the module's buffers");
    world_.communicator().broadcast(together, /*root=*/0, "the module's buffers").wait();
    if (world_.rank() == 0) continue;
    int64_t offset = 0;
    for (const at::Tensor& buffer : buffers) {
      // Not buffer.copy_(): a backward that is to come would take it for a change of what it needs.
      buffer.variable_data().copy_(together.narrow(0, offset, buffer.numel()).view(buffer.sizes()));
      offset += buffer.numel();
    }
  }
}

}  // namespace zeropage
