// The MLPs of Llama's kind of layer: SwiGLU, and a mixture of experts that are each a SwiGLU.
#pragma once

#include <torch/torch.h>
#include <zeropage/experts.h>

#include "language_model/model/config.h"
#include "language_model/model/layers.h"

namespace language_model {

class LlamaMlpImpl : public torch::nn::Module {
 public:
  LlamaMlpImpl(int64_t width, int64_t mlp_width, bool has_bias);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  Projection gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(LlamaMlp);

// The experts that a router chooses for a token, and in Qwen2-MoE one that all tokens take, times the sigmoid of a gate. The weights of
// all experts are stacked; weights/expert_names.h says what they are called in files.
class SparseMlpImpl : public torch::nn::Module {
 public:
  // Weights are zero.
  explicit SparseMlpImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

  zeropage::parallel::Experts experts{nullptr};

 private:
  LlamaMlp shared_expert{nullptr};
  Projection shared_expert_gate{nullptr};
};
TORCH_MODULE(SparseMlp);

}  // namespace language_model
