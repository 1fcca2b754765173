// A loss of weight 0 under the backward that takes place for the sake of collectives. Its own gradients are zeros, also where
// the loss is not a number: what it alone leads to is computed, and then made zeros, before it meets anything else. What
// other ranks' losses give on the way, with whose tokens this rank's experts, attention or batch norm have computed
// (parallel/nodes_of_ranks.h), goes on to the parameters.
//
// Cost: a walk over the nodes of the graph, and zeros of the size of what is made zeros; no wait for a device.
// Lifetime: from before the backward until all of it is over; its hooks leave the graph with it.
// Threads: made and dropped where no backward of this graph runs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/function.h>

namespace zeropage::accumulate {

class WeightlessLoss {
 public:
  // loss: requires grad.
  explicit WeightlessLoss(const at::Tensor& loss);
  ~WeightlessLoss();
  WeightlessLoss(const WeightlessLoss&) = delete;
  WeightlessLoss& operator=(const WeightlessLoss&) = delete;

  // Whether its backward may give gradients that are of other ranks' losses. Otherwise nothing that it gives counts.
  bool meets_others() const { return meets_others_; }

 private:
  struct Hook {
    std::shared_ptr<torch::autograd::Node> node;
    uintptr_t key;
  };
  std::vector<Hook> hooks_;
  bool meets_others_ = false;
};

}  // namespace zeropage::accumulate
