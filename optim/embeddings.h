// Which parameters of a module are embeddings, or heads: matrices of which each row belongs to a token, and no direction of the
// whole.
#pragma once

#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>

namespace zeropage::optim {

class Embeddings {
 public:
  Embeddings() = default;
  explicit Embeddings(const torch::nn::Module& module);

  // Sizes of embeddings, one behind the other: "11 8 ". Those of a text that another rank gave are embeddings' here, too.
  std::string sizes() const;
  void add_sizes(const std::string& text);

  // Whether it is the weight of an embedding, or has the sizes of one and is not square, as a head.
  bool contain(const at::Tensor& parameter) const;

 private:
  std::unordered_set<const c10::TensorImpl*> weights_;
  std::set<std::vector<int64_t>> sizes_;
};

}  // namespace zeropage::optim
