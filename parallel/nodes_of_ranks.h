// Which nodes of autograd's graph give gradients that are of other ranks' losses: this rank has computed with their tokens, or
// they with its own. The ranks of a node along "tensor" have one loss, so those are none.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace zeropage::parallel {

namespace context {
bool is_node_of_attention(const torch::autograd::Node& node);
}
namespace experts {
bool is_node_of_rows(const torch::autograd::Node& node);
}
bool is_node_of_batch_norm(const torch::autograd::Node& node);

inline bool gives_gradients_of_other_losses(const torch::autograd::Node& node) {
  return context::is_node_of_attention(node) || experts::is_node_of_rows(node) ||
         is_node_of_batch_norm(node);
}

}  // namespace zeropage::parallel
