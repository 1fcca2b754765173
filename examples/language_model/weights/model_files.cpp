#include "language_model/weights/model_files.h"

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "language_model/weights/expert_names.h"
#include "language_model/weights/gguf_weights.h"
#include "language_model/weights/renamed_weights.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;
using zeropage::WeightsSource;

// GPT-2's files as they were first published have names without "transformer.", and the causal masks as buffers.
std::optional<std::string> gpt2_name(const std::string& name) {
  if (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")) return std::nullopt;
  const bool is_whole = name.starts_with("transformer.") || name.starts_with("lm_head.");
  return is_whole ? name : "transformer." + name;
}

}  // namespace

ModelFiles::ModelFiles(const fs::path& path) : path_(path) {
  if (!fs::exists(path)) throw std::runtime_error(path.string() + ": is not there");
  if (!fs::is_directory(path)) {
    if (path.extension() != ".gguf") {
      throw std::runtime_error(path.string() +
                               ": expected a .gguf file, or a folder with config.json and "
                               "model.safetensors");
    }
    gguf_ = std::make_shared<zeropage::text::GgufFile>(path);
    config_ = config_of(*gguf_);
    return;
  }
  if (!fs::exists(path / kConfig)) {
    throw std::runtime_error(path.string() + ": has no config.json, as Hugging Face's models have");
  }
  config_ = read_config(path / kConfig);
}

std::unique_ptr<WeightsSource> ModelFiles::open_weights() const {
  if (gguf_) return std::make_unique<GgufWeights>(gguf_, config_);
  const bool is_one = fs::exists(path_ / kWeights);
  if (!is_one && !fs::exists(path_ / kIndex)) {
    throw std::runtime_error(path_.string() + ": has neither " + kWeights + " nor " + kIndex);
  }
  auto source = zeropage::open_weights(path_ / (is_one ? kWeights : kIndex));
  if (config_.experts) return std::make_unique<ExpertWeights>(std::move(source), config_);
  if (config_.architecture != Architecture::kGpt2) return source;
  return std::make_unique<RenamedWeights>(std::move(source), gpt2_name);
}

}  // namespace language_model
