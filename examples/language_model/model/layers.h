// What the models are made of. What zeropage/fused.h has in one pass comes from there.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/torch.h>
#include <zeropage/context_parallel.h>
#include <zeropage/fused.h>
#include <zeropage/world.h>

#include "language_model/model/config.h"

namespace language_model {

// ---- formulas ----

// Rotary positions for zeropage::fused::rotary(): [length, head width / 2], or [batch, length, head width / 2]; fp32, or fp64.
struct RotaryAngles {
  torch::Tensor cos;
  torch::Tensor sin;
};
// positions: [1 or batch, length] of whole numbers. of: the dtype of heads; fp64 has tables in fp64. Angles are multiplied in fp32, as
// in transformers.
RotaryAngles rotary_angles(const ModelConfig& config, const torch::Tensor& positions,
                           torch::ScalarType of = torch::kFloat32);

// Ranks that have the same rows, and each of them some tokens of those (zeropage/context_parallel.h).
struct ContextAxis {
  zeropage::comm::World ranks;
  zeropage::parallel::ContextForm form = zeropage::parallel::ContextForm::kRing;
};

// Which keys a query sees.
struct AttentionMask {
  // [batch or 1, 1, queries, keys] of bool. Undefined: query i sees the first i + 1 keys, or, if there is one query, all.
  torch::Tensor seen;
  double dropout = 0;  // of probabilities
  // Where ranks have the other tokens; `seen` is undefined then, and documents are in `documents`, [batch, length], if any are.
  const ContextAxis* context = nullptr;
  torch::Tensor documents;
};
// queries: [batch, heads, length, head width]; keys, values: [batch, key-value heads, keys, head width], each for as many
// neighbouring heads of queries. Returns [batch, length, heads * head width].
torch::Tensor attention(const torch::Tensor& queries, const torch::Tensor& keys,
                        const torch::Tensor& values, const AttentionMask& mask);

// A target that counts for nothing.
inline constexpr int64_t kIgnored = -100;
// The mean cross entropy of the next token over all targets but kIgnored, fp32 []. 0 where there are none. x: [..., width]; weight:
// [vocabulary, width]; targets: [...].
torch::Tensor head_loss(const torch::Tensor& x, const torch::Tensor& weight,
                        const torch::Tensor& targets);

// ---- modules ----

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double epsilon);
  torch::Tensor forward(const torch::Tensor& x) {
    return zeropage::fused::rms_norm(x, weight, epsilon_);
  }
  // The norm of x + residual, and the sum.
  zeropage::fused::Added add(const torch::Tensor& x, const torch::Tensor& residual);

  torch::Tensor weight;

 private:
  const double epsilon_;
};
TORCH_MODULE(RmsNorm);

// A change of low rank to a projection (Hu et al. 2021, "LoRA"): scale * B A x is added to what the projection computes.
struct AdapterOptions {
  int64_t rank = 8;
  double alpha = 16;   // scale = alpha / rank
  double dropout = 0;  // of the adapter's inputs, in training
};

// A linear layer that may have an adapter, whose weights are then lora_A.weight [rank, inputs] and lora_B.weight
// [outputs, rank] beside its own, as peft names them.
class ProjectionImpl : public torch::nn::Module {
 public:
  enum class Layout : uint8_t {
    kOutputsFirst,  // weight [outputs, inputs], as torch::nn::Linear
    kInputsFirst,   // weight [inputs, outputs], as the Conv1D of GPT-2
  };
  ProjectionImpl(int64_t inputs, int64_t outputs, bool bias, Layout layout = Layout::kOutputsFirst);
  torch::Tensor forward(const torch::Tensor& x);

  // A is drawn as torch::nn::Linear draws, B is zero: the module computes what it did. Once.
  void add_adapter(const AdapterOptions& options);
  bool has_adapter() const { return !lora_a.is_empty(); }
  const AdapterOptions& adapter_options() const { return adapter_; }
  // What the adapter adds to `weight`, in its layout, for these values of lora_A.weight and lora_B.weight.
  torch::Tensor adapter_product(const torch::Tensor& a, const torch::Tensor& b) const;

  torch::Tensor weight, bias;  // bias: undefined where there is none
  torch::nn::Linear lora_a{nullptr}, lora_b{nullptr};

 private:
  const int64_t inputs_, outputs_;
  const Layout layout_;
  AdapterOptions adapter_;
};
TORCH_MODULE(Projection);

// Tokens to vectors. Without a draw of its own.
class TableImpl : public torch::nn::Module {
 public:
  // tied: the weight of another table, or undefined.
  TableImpl(int64_t rows, int64_t width, const torch::Tensor& tied = {});
  torch::Tensor forward(const torch::Tensor& rows) { return torch::embedding(weight, rows); }

  torch::Tensor weight;  // [rows, width]
};
TORCH_MODULE(Table);

// ---- generation ----

// Keys and values of the tokens so far, for a forward that goes on behind them. Memory: 2 x layers x batch x key-value heads x
// capacity x head width elements, from the first forward on.
class KeyValueCache {
 public:
  KeyValueCache(int64_t layers, int64_t capacity);

  int64_t length() const { return length_; }  // tokens so far
  int64_t capacity() const { return capacity_; }
  // Adds those of the next tokens and returns all so far: [batch, heads, tokens, width]. Throws past the capacity.
  std::pair<torch::Tensor, torch::Tensor> append(int64_t layer, const torch::Tensor& keys,
                                                 const torch::Tensor& values);
  // All layers have those tokens.
  void advance(int64_t tokens) { length_ += tokens; }

 private:
  const int64_t capacity_;
  int64_t length_ = 0;
  std::vector<torch::Tensor> keys_, values_;  // by layer, [batch, heads, capacity, width]
};

}  // namespace language_model
