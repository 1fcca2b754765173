#include "language_model/weights/export.h"

#include <fstream>
#include <set>
#include <stdexcept>

#include <zeropage/gathered_parameters.h>

#include "language_model/weights/adapters.h"
#include "language_model/weights/safetensors_writer.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;

constexpr std::array kTokenizerFiles = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "encoder.json",
                                        "vocab.bpe",
                                        "added_tokens.json",
                                        "special_tokens_map.json",
                                        "generation_config.json"};

// A tied parameter under its first name alone.
std::vector<SafetensorsWriter::Entry> entries_of(const WrappedModel& model,
                                                 const ExportOptions& options) {
  std::vector<SafetensorsWriter::Entry> entries;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : model.named_parameters()) {
    const torch::Tensor& tensor = parameter.value();
    if (is_of_adapter(parameter.key()) || !seen.insert(tensor.unsafeGetTensorImpl()).second)
      continue;
    entries.push_back(
        {parameter.key(), tensor.sizes().vec(), options.dtype.value_or(tensor.scalar_type())});
  }
  return entries;
}

void copy_tokenizer(const fs::path& from, const fs::path& to) {
  if (from.empty() || !fs::is_directory(from) || fs::equivalent(from, to)) return;
  for (const char* file : kTokenizerFiles) {
    if (!fs::exists(from / file)) continue;
    fs::copy_file(from / file, to / file, fs::copy_options::overwrite_existing);
  }
}

}  // namespace

void RankZero::settle(const std::string& topic) const {
  for (const std::string& error : world_.gather_text(topic, error_)) {
    if (!error.empty()) throw std::runtime_error(error);
  }
}

const char* name_of(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kBFloat16:
      return "bfloat16";
    case torch::kHalf:
      return "float16";
    default:
      return "float32";
  }
}

void export_model(const fs::path& folder, WrappedModel& model, const ExportOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto entries = entries_of(model, options);
  std::set<std::string> names;
  for (const auto& entry : entries) names.insert(entry.name);
  std::map<std::string, Projection> adapted;
  for (const auto& [name, layer] : model->projections()) {
    if (layer->has_adapter()) adapted.emplace(name + ".weight", layer);
  }
  RankZero writing(model.all_ranks());
  std::unique_ptr<SafetensorsWriter> file;
  writing.run([&] {
    fs::create_directories(folder);
    file = std::make_unique<SafetensorsWriter>(folder / "model.safetensors", entries);
  });
  zeropage::visit_parameters(model, [&](const std::string& name, const torch::Tensor& values) {
    if (!names.contains(name)) return;
    torch::Tensor merged = values;
    // An operator on parameters, which all ranks run.
    if (const auto layer = adapted.find(name); layer != adapted.end()) {
      merged = values.to(torch::kFloat32) + layer->second->adapter_product();
    }
    writing.run([&] { file->write(name, merged); });
  });
  writing.run([&] {
    file->finish();
    const std::string config =
        to_json(model->config(), name_of(entries.front().dtype)).dump(2) + "\n";
    std::ofstream stream(folder / "config.json");
    stream << config;
    stream.close();
    TORCH_CHECK(stream, (folder / "config.json").string(), ": cannot be written");
    copy_tokenizer(options.tokenizer_from, folder);
  });
  writing.settle("exporting the model to " + folder.string());
}

}  // namespace language_model
