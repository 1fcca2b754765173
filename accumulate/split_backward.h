// A backward in two halves: first the gradient of one input, which somebody waits for, and later those of the
// parameters (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
//
//   accumulate::SplitBackward backward(output, gradient, input);
//   send(backward.input_gradient());
//   ...
//   backward.finish();                     // the parameters' p.grad()
//
// Both halves together do the matrix products of one backward, and gradients have its bits. A node of the graph is
// asked for its input's gradient in the first half and for its parameters' in the second one, as torch::autograd::grad
// asks for some gradients of many. So only nodes that cannot tell the two apart compute both twice: a
// torch::autograd::Function that does not ask needs_input_grad(), and a recurrent layer by oneDNN.
//
// Hooks of parameters, and of what only they lead to, are called in the second half, whose end is the one end of
// backward. Hooks of what leads to the input are called in the first half. What a checkpointed region or a Recompute
// dropped is computed again in each half.
//
// Cost: between the halves it keeps what the nodes with parameters saved, and the gradient that came to each. What the
// other nodes on the way to the input saved is let go with the first half.
//
// Lifetime: owns the rest of the graph; no other backward may run through it. Dropping it drops the second half.
// Threads: one at a time. Collective where the backward is.
// Throws what backward() throws.
#pragma once

#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/edge.h>

namespace zeropage::accumulate {

class SplitBackward {
 public:
  // Does the first half. output: requires grad; gradient: of its sizes; input: a leaf that requires grad. If it is
  // undefined, or the output does not depend on it, the first half is empty and the second one is the whole backward.
  SplitBackward(const at::Tensor& output, const at::Tensor& gradient, const at::Tensor& input);
  // Both halves are empty for an output that nothing which trains leads to.
  SplitBackward() = default;
  SplitBackward(SplitBackward&&) = default;
  SplitBackward& operator=(SplitBackward&&) = default;

  // Undefined where the first half is empty.
  const at::Tensor& input_gradient() const { return input_gradient_; }

  // Does the second half; once.
  void finish();

 private:
  at::Tensor input_gradient_;
  // Where the second half begins, and with which gradients; undefined ones among them, where a node has none for one of
  // its outputs.
  std::vector<torch::autograd::Edge> roots_;
  std::vector<at::Tensor> gradients_;
  bool is_finished_ = false;
};

}  // namespace zeropage::accumulate
