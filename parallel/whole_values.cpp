#include "parallel/whole_values.h"

#include <vector>

#include <ATen/ATen.h>

namespace zeropage::parallel {

void take_values_of_rank_zero(const torch::nn::Module& whole, const comm::World& world,
                              const std::string& who) {
  if (world.size() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = whole.parameters();
  for (const at::Tensor& buffer : whole.buffers()) tensors.push_back(buffer);
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const at::Tensor values = tensor.to(world.communicator().device()).contiguous().clone();
    world.communicator().broadcast(values.view({-1}), /*root=*/0, who).wait();
    tensor.copy_(values);
  }
}

}  // namespace zeropage::parallel
