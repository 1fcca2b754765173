#include "optim/embeddings.h"

#include <sstream>

#include <torch/nn/modules/embedding.h>

namespace zeropage::optim {

Embeddings::Embeddings(const torch::nn::Module& module) {
  const auto add = [this](const at::Tensor& weight) {
    weights_.insert(weight.unsafeGetTensorImpl());
    sizes_.insert(weight.sizes().vec());
  };
  // Without the module itself, which may lie on the stack.
  for (const auto& part : module.modules(/*include_self=*/false)) {
    if (const auto* one = part->as<torch::nn::Embedding>()) add(one->weight);
    if (const auto* bag = part->as<torch::nn::EmbeddingBag>()) add(bag->weight);
  }
}

std::string Embeddings::sizes() const {
  std::ostringstream text;
  for (const std::vector<int64_t>& sizes : sizes_) text << sizes[0] << ' ' << sizes[1] << ' ';
  return text.str();
}

void Embeddings::add_sizes(const std::string& text) {
  std::istringstream numbers(text);
  std::vector<int64_t> sizes(2);
  while (numbers >> sizes[0] >> sizes[1]) sizes_.insert(sizes);
}

bool Embeddings::contain(const at::Tensor& parameter) const {
  if (weights_.contains(parameter.unsafeGetTensorImpl())) return true;
  // A square one is rather a layer as wide as the context is long.
  return parameter.dim() == 2 && parameter.size(0) != parameter.size(1) &&
         sizes_.contains(parameter.sizes().vec());
}

}  // namespace zeropage::optim
