// Weights of a GGUF file, as llama.cpp writes it, under Hugging Face's names: dequantised, and with the rows of queries and keys
// back in Hugging Face's order.
//
//   auto file = std::make_shared<zeropage::text::GgufFile>("model.gguf");
//   const ModelConfig config = config_of(*file);
//   GgufWeights weights(file, config);
//   zeropage::load_weights(weights, model);
//
// Known are the architectures llama (Mistral's too) and qwen2.
// Throws std::runtime_error.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <zeropage/saving.h>
#include <zeropage/text/gguf_file.h>

#include "language_model/model/config.h"

namespace language_model {

ModelConfig config_of(const zeropage::text::GgufFile& file);

class GgufWeights final : public zeropage::WeightsSource {
 public:
  // config: the file's. Throws for a tensor of a type that is not read, with the names of all.
  GgufWeights(std::shared_ptr<const zeropage::text::GgufFile> file, const ModelConfig& config);

  std::string name() const override { return file_->name(); }
  const std::vector<Entry>& tensors() const override { return tensors_; }
  void read(const Entry& entry, int64_t first, const at::Tensor& to) override;

 private:
  struct Place {
    size_t tensor = 0;       // of the file
    int64_t head_width = 0;  // above 0: the rows of each head lie interleaved
  };

  const std::shared_ptr<const zeropage::text::GgufFile> file_;
  std::vector<Entry> tensors_;
  std::unordered_map<std::string, Place> places_;
};

}  // namespace language_model
