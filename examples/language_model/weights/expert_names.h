// What the weights of experts are called in Hugging Face's files, which have a tensor for each expert, and in the module, which has one for
// each matrix of all experts (zeropage/experts.h).
//
//   model.layers.0.mlp.experts.w_up  [experts, width, d]:  model.layers.0.mlp.experts.0.up_proj.weight  [width, d], ...
//   model.layers.0.mlp.experts.router:                     model.layers.0.mlp.gate.weight
//
// Mixtral's are block_sparse_moe.experts.N.{w1 (gate), w3 (up), w2 (down)} and block_sparse_moe.gate.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/torch.h>
#include <zeropage/saving.h>

#include "language_model/model/config.h"

namespace language_model {

struct FileTensor {
  std::string name;
  std::vector<int64_t> sizes;
};

// The tensors of files that are this parameter of the module, in the order in which they are stacked. sizes: the parameter's, where the
// first of a stack's may be those of this rank's experts alone. One for each that is no stack.
std::vector<FileTensor> tensors_in_files(const ModelConfig& config, const std::string& parameter,
                                         at::IntArrayRef sizes);
// Whether the parameter is a stack.
bool is_stack(const ModelConfig& config, const std::string& parameter);

// A source of files under the module's names. Each expert is read where it lies in its stack, so a rank reads what it has of it alone.
class ExpertWeights final : public zeropage::WeightsSource {
 public:
  // Throws std::runtime_error where an expert is missing, of another shape, or of another dtype than the others of its stack, with all
  // names.
  ExpertWeights(std::unique_ptr<zeropage::WeightsSource> source, const ModelConfig& config);

  std::string name() const override { return source_->name(); }
  const std::vector<Entry>& tensors() const override { return tensors_; }
  std::map<std::string, std::string> aliases() const override { return source_->aliases(); }
  void read(const Entry& entry, int64_t first, const at::Tensor& to) override;

 private:
  const std::unique_ptr<zeropage::WeightsSource> source_;
  std::vector<Entry> tensors_;
  // By the module's name: one for each expert, or one.
  std::unordered_map<std::string, std::vector<const Entry*>> parts_;
};

}  // namespace language_model
