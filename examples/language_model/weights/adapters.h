// Adapters alone on disk, as peft has them: adapter_config.json, and adapter_model.safetensors with names such as
// "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
//
// Throws std::runtime_error and zeropage::state::StateError.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <zeropage/saving.h>

#include "language_model/model/wrapped_model.h"

namespace language_model {

// In front of the module's names.
inline constexpr const char* kAdapterPrefix = "base_model.model.";

bool is_of_adapter(const std::string& parameter);

// base: the model's path, for adapter_config.json. dtype: what weights are written in; float32 writes the fp32 values of what is
// trained in bf16; unset: that of the parameters. folder: made where it is not there. Rank 0 writes. Throws on all ranks alike.
// Collective.
void save_adapters(const std::filesystem::path& folder, WrappedModel& model,
                   const std::string& base, std::optional<torch::ScalarType> dtype = std::nullopt);

class AdapterFiles {
 public:
  explicit AdapterFiles(const std::filesystem::path& folder);

  const AdapterOptions& options() const { return options_; }
  const std::vector<std::string>& layers() const { return layers_; }
  // Under the module's names.
  std::unique_ptr<zeropage::WeightsSource> open_weights() const;

 private:
  const std::filesystem::path folder_;
  AdapterOptions options_;
  std::vector<std::string> layers_;
};

}  // namespace language_model
