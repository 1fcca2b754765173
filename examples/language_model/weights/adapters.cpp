#include "language_model/weights/adapters.h"

#include <fstream>
#include <set>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "language_model/weights/exact_values.h"
#include "language_model/weights/export.h"
#include "language_model/weights/renamed_weights.h"
#include "language_model/weights/safetensors_writer.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kAdapterWeights = "adapter_model.safetensors";

json adapter_config_of(const WrappedModel& model, const std::string& base) {
  std::set<std::string> layers;
  AdapterOptions options;
  for (const auto& [name, layer] : model.module()->projections()) {
    if (!layer->has_adapter()) continue;
    layers.insert(name.substr(name.rfind('.') + 1));
    options = layer->adapter_options();
  }
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path", base},
          {"r", options.rank},
          {"lora_alpha", options.alpha},
          {"lora_dropout", options.dropout},
          {"target_modules", layers},
          {"fan_in_fan_out", model.module()->config().architecture == Architecture::kGpt2},
          {"bias", "none"},
          {"inference_mode", true}};
}

}  // namespace

bool is_of_adapter(const std::string& parameter) {
  return parameter.find(".lora_A.") != std::string::npos ||
         parameter.find(".lora_B.") != std::string::npos;
}

void save_adapters(const fs::path& folder, WrappedModel& model, const std::string& base,
                   std::optional<torch::ScalarType> dtype) {
  const torch::NoGradGuard no_grad;
  std::vector<SafetensorsWriter::Entry> entries;
  for (const auto& parameter : model.named_parameters()) {
    if (!is_of_adapter(parameter.key())) continue;
    entries.push_back({kAdapterPrefix + parameter.key(), parameter.value().sizes().vec(),
                       dtype.value_or(parameter.value().scalar_type())});
  }
  TORCH_CHECK(!entries.empty(), "the model has no adapter to save");
  RankZero writing(model.all_ranks());
  std::unique_ptr<SafetensorsWriter> file;
  writing.run([&] {
    fs::create_directories(folder);
    file = std::make_unique<SafetensorsWriter>(folder / kAdapterWeights, entries);
  });
  // Not visit_parameters(), which would gather the frozen ones too.
  visit_exact_values(model, is_of_adapter,
                     [&](const std::string& name, const torch::Tensor& values) {
                       writing.run([&] { file->write(kAdapterPrefix + name, values); });
                     });
  writing.run([&] {
    file->finish();
    write_json(folder / kAdapterConfig, adapter_config_of(model, base));
  });
  writing.settle("saving adapters to " + folder.string());
}

AdapterFiles::AdapterFiles(const fs::path& folder) : folder_(folder) {
  const std::string name = (folder / kAdapterConfig).string();
  std::ifstream stream(folder / kAdapterConfig);
  if (!stream) throw std::runtime_error(name + ": cannot be read");
  const json config = json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) throw std::runtime_error(name + ": is no JSON object");
  if (config.value("peft_type", json()) != "LORA") {
    throw std::runtime_error(name + ": expected peft_type \"LORA\", got " +
                             config.value("peft_type", json()).dump());
  }
  const json rank = config.value("r", json()), alpha = config.value("lora_alpha", json());
  const json layers = config.value("target_modules", json());
  if (!rank.is_number_integer() || rank < 1 || !alpha.is_number() || !layers.is_array() ||
      layers.empty()) {
    throw std::runtime_error(name +
                             ": expected \"r\" of 1 or more, a number \"lora_alpha\" and a "
                             "list \"target_modules\"");
  }
  for (const char* unknown : {"use_dora", "use_rslora"}) {
    if (config.value(unknown, json(false)) == true) {
      throw std::runtime_error(name + ": " + unknown + " is not supported");
    }
  }
  for (const char* unknown :
       {"alpha_pattern", "rank_pattern", "modules_to_save", "layers_to_transform",
        "exclude_modules", "megatron_config", "lora_bias"}) {
    const json value = config.value(unknown, json());
    if (!value.is_null() && !(value.is_structured() && value.empty()) && value != false) {
      throw std::runtime_error(name + ": " + unknown + " is not supported, got " + value.dump());
    }
  }
  if (const json bias = config.value("bias", json("none")); bias != "none") {
    throw std::runtime_error(name + ": bias: expected \"none\", got " + bias.dump());
  }
  options_ = {.rank = rank, .alpha = alpha, .dropout = 0};
  for (const json& layer : layers) {
    if (!layer.is_string()) throw std::runtime_error(name + ": target_modules: expected names");
    layers_.push_back(layer);
  }
}

std::unique_ptr<zeropage::WeightsSource> AdapterFiles::open_weights() const {
  return std::make_unique<RenamedWeights>(
      zeropage::open_weights(folder_ / kAdapterWeights), [](const std::string& name) {
        return std::optional(name.starts_with(kAdapterPrefix)
                                 ? name.substr(std::string(kAdapterPrefix).size())
                                 : name);
      });
}

}  // namespace language_model
