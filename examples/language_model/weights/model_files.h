// A model as it comes: a folder as Hugging Face has it, or a GGUF file.
//
//   const ModelFiles files("SmolLM2-135M");
//   zeropage::DeferredModule deferred([&] { return make_model(files.config()); });
//   zeropage::DistributedDataParallel model(std::move(deferred), world, options);
//   zeropage::load_weights(*files.open_weights(), model);
//
// Throws std::runtime_error and zeropage::state::StateError, with the file's name.
#pragma once

#include <filesystem>
#include <memory>

#include <zeropage/saving.h>
#include <zeropage/text/gguf_file.h>

#include "language_model/model/config.h"

namespace language_model {

class ModelFiles {
 public:
  // The files of a folder.
  static constexpr const char* kConfig = "config.json";
  static constexpr const char* kWeights = "model.safetensors";
  static constexpr const char* kIndex = "model.safetensors.index.json";

  // path: *.gguf; or a folder with config.json and model.safetensors, or model.safetensors.index.json and the files that
  // it names.
  explicit ModelFiles(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const ModelConfig& config() const { return config_; }
  // Null: it is a folder.
  const std::shared_ptr<const zeropage::text::GgufFile>& gguf() const { return gguf_; }

  // Under the names that make_model() has. Each rank opens its own.
  std::unique_ptr<zeropage::WeightsSource> open_weights() const;

 private:
  const std::filesystem::path path_;
  std::shared_ptr<const zeropage::text::GgufFile> gguf_;
  ModelConfig config_;
};

}  // namespace language_model
