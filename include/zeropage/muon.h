// `Muon`, an optimizer of whole matrices, with AdamW for all that is none.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "zeropage/detail/optimizer_traits.h"

namespace zeropage {

// What a parameter group of Muon is updated by.
enum class MuonRule : uint8_t {
  kMuon,   // each matrix as a whole
  kAdamW,  // each element by itself (Loshchilov and Hutter 2019, algorithm 2)
};

// What an update of a matrix [m, n] is multiplied by, besides the learning rate.
enum class MuonScale : uint8_t {
  kOriginal,       // sqrt(max(1, m / n)), Jordan's
  kMatchRmsAdamW,  // 0.2 sqrt(max(m, n)), as large as AdamW's (Liu et al. 2025, arXiv:2502.16982)
};

// What of a parameter is a matrix. Another number of dimensions is refused.
enum class MuonMatrices : uint8_t {
  kParameter,  // a parameter of two dimensions
  kBatch,      // of three: each element of the first one is a matrix, as of experts
  kFlattened,  // of two or more: all but the first one are columns, as of a convolution's weight
};

struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  using coefficients_t = std::tuple<double, double, double>;
  using betas_t = std::tuple<double, double>;

  MuonOptions(double lr = 1e-3);  // implicit, as torch::optim's options are
  // A group that AdamW updates: weight_decay is 0.01 there, as torch::optim::AdamWOptions have it.
  static MuonOptions adamw(double lr = 1e-3);

  TORCH_ARG(MuonRule, rule) = MuonRule::kMuon;
  // At least 0.
  TORCH_ARG(double, lr) = 1e-3;
  // Decay of the value, apart from the gradient, times lr; at least 0.
  TORCH_ARG(double, weight_decay) = 0.1;

  // These are Muon's.
  // How much of the average of gradients is kept; in [0, 1).
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  // The Newton-Schulz iteration's, and how often it is made: 1 to 99.
  TORCH_ARG(coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  TORCH_ARG(int64_t, ns_steps) = 5;
  // The least norm that a matrix is divided by; at least 1e-30.
  TORCH_ARG(double, ns_eps) = 1e-7;
  // float or bfloat16. Undefined: bfloat16 on an accelerator, and float on the CPU, where bfloat16 takes many times as
  // long. Ranks send each other matrices in it.
  TORCH_ARG(c10::ScalarType, ns_dtype) = c10::ScalarType::Undefined;
  TORCH_ARG(MuonScale, scale) = MuonScale::kOriginal;
  TORCH_ARG(MuonMatrices, matrices) = MuonMatrices::kParameter;
  // Rows of the blocks that a matrix is made of, each of which is a matrix of its own: {d, d, d} for query, key and value in
  // one weight [3 d, n]. A single number repeats: {d / heads} for each head. Empty: the matrix is one.
  TORCH_ARG(std::vector<int64_t>, row_blocks);
  // Takes embeddings and heads, too, which are better off with AdamW.
  TORCH_ARG(bool, takes_embeddings) = false;

  // These are AdamW's.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

  friend bool operator==(const MuonOptions& one, const MuonOptions& other);
};

// Throws unless the options are in range.
void check_options(const MuonOptions& options);

// The module's parameters in groups: the weights that Muon is for, with `matrices`, and the others, with `others`. Muon's are
// those of two dimensions but for embeddings, and for weights of an embedding's sizes that are not square, which are heads. matrices.matrices()
// takes in more: kBatch those of three dimensions that are no convolution's, in a group between these, and kFlattened those of three or more. A group may be
// empty.
std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const torch::nn::Module& module, const MuonOptions& matrices,
    const MuonOptions& others = MuonOptions::adamw());
// The same of some parameters: those of a pipeline's stage, where the embedding is on another one. The module is the whole one;
// one without memory will do (DeferredModule).
std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const torch::nn::Module& module, const std::vector<at::Tensor>& parameters,
    const MuonOptions& matrices, const MuonOptions& others = MuonOptions::adamw());

// U V^T, roughly, where matrix = U S V^T: after `ns_steps` iterations of X = a X + (b X X^T + c (X X^T)^2) X its singular
// values lie between about 0.7 and 1.2 (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").
// matrix: [m, n], floating point. Returns fp32 [m, n]. On the CPU its bits depend neither on the number of threads nor on
// strides.
at::Tensor orthogonalised(const at::Tensor& matrix, const MuonOptions& options = {});

// The optimizer Muon (Jordan et al. 2024), by torch.optim.Muon's formulas, as a class of torch::optim:
//
//   momentum_buffer = momentum momentum_buffer + (1 - momentum) gradient
//   direction = (1 - momentum) gradient + momentum momentum_buffer                     // nesterov; else momentum_buffer
//   value = value (1 - lr weight_decay) - lr scale orthogonalised(direction)
//
//   #include <zeropage/muon.h>
//   zeropage::Optimizer<zeropage::Muon> optimizer(
//       model, zeropage::muon_groups(*net, zeropage::MuonOptions(0.02), zeropage::MuonOptions::adamw(3e-4)));
//
// Sharded, a matrix comes to one rank while step() runs, and its update goes back: values, momentum and states stay as
// they are at each stage and tier, and have the same bits. By itself it is for one process.
//
// A vector, an embedding, a weight of an embedding's sizes, or a convolution in a group of MuonRule::kMuon is refused,
// unless options say what to do with it.
// Parameters: fp32 by itself; sharded, those with fp32 values, master weights or stochastic rounding.
// Threads: as any torch::optim class. Throws c10::Error on options out of range and on parameters that it cannot update.
class Muon : public torch::optim::Optimizer {
 public:
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const MuonOptions& defaults = {});
  explicit Muon(std::vector<torch::Tensor> parameters, const MuonOptions& defaults = {})
      : Muon({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  // Steps parameters that have a gradient. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

template <>
struct OptimizerTraits<Muon> {
  using Options = MuonOptions;
  static constexpr UpdateReads kReads = UpdateReads::kMatrix;
};

}  // namespace zeropage
