#include "language_model/weights/random_model.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <nlohmann/json.hpp>
#include <zeropage/distributed_data_parallel.h>

#include "language_model/model/language_model.h"
#include "language_model/weights/expert_names.h"
#include "language_model/weights/export.h"
#include "language_model/weights/model_files.h"
#include "language_model/weights/safetensors_writer.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;
using Entry = SafetensorsWriter::Entry;

// Numbers that are drawn at once.
constexpr int64_t kPieceNumel = int64_t{1} << 20;

int64_t numel_of(const Entry& entry) {
  return c10::multiply_integers(entry.sizes);
}

int64_t bytes_of(const Entry& entry) {
  return numel_of(entry) * static_cast<int64_t>(c10::elementSize(entry.dtype));
}

// All parameters, a tied one once.
std::vector<Entry> entries_of(const ModelConfig& config, torch::ScalarType dtype) {
  zeropage::DeferredModule<std::shared_ptr<LanguageModel>> without_memory(
      [&] { return make_model(config); });
  std::vector<Entry> entries;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : without_memory.module()->named_parameters()) {
    const torch::Tensor& tensor = parameter.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    for (FileTensor& of_file : tensors_in_files(config, parameter.key(), tensor.sizes())) {
      entries.push_back({std::move(of_file.name), std::move(of_file.sizes), dtype});
    }
  }
  return entries;
}

std::vector<std::vector<Entry>> split(const std::vector<Entry>& entries, int64_t file_bytes) {
  std::vector<std::vector<Entry>> files;
  int64_t bytes = 0;
  for (const Entry& entry : entries) {
    if (files.empty() || bytes + bytes_of(entry) > file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(entry);
    bytes += bytes_of(entry);
  }
  return files;
}

std::string file_name(size_t index, size_t count) {
  if (count == 1) return ModelFiles::kWeights;
  char name[48];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

// In fp32 and then rounded: LibTorch draws in bf16 from so few numbers that some are infinite.
torch::Tensor drawn(const Entry& entry, const ModelConfig& config, at::Generator& generator) {
  if (entry.sizes.size() < 2) {
    return torch::full(entry.sizes, entry.name.ends_with("bias") ? 0.0 : 1.0,
                       torch::dtype(entry.dtype));
  }
  const double deviation = first_deviation(config, entry.name);
  const torch::Tensor values = torch::empty(entry.sizes, torch::dtype(entry.dtype));
  const torch::Tensor flat = values.view({-1});
  for (int64_t begin = 0; begin < flat.numel(); begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, flat.numel() - begin);
    flat.narrow(0, begin, numel).copy_(torch::empty({numel}).normal_(0, deviation, generator));
  }
  return values;
}

}  // namespace

RandomModel write_random_model(const fs::path& folder, const ModelConfig& config,
                               const RandomModelOptions& options) {
  for (const char* file : {ModelFiles::kWeights, ModelFiles::kIndex}) {
    if (!fs::exists(folder / file)) continue;
    throw std::runtime_error((folder / file).string() +
                             ": the folder has a model already; give another one");
  }
  const torch::NoGradGuard no_grad;
  const auto files = split(entries_of(config, options.dtype), options.file_bytes);
  fs::create_directories(folder);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  RandomModel made{.files = static_cast<int64_t>(files.size())};
  nlohmann::json places = nlohmann::json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = file_name(i, files.size());
    SafetensorsWriter file(folder / name, files[i]);
    for (const Entry& entry : files[i]) {
      file.write(entry.name, drawn(entry, config, generator));
      places[entry.name] = name;
      made.parameters += numel_of(entry);
      made.bytes += bytes_of(entry);
    }
    file.finish();
  }
  write_json(folder / ModelFiles::kConfig, to_json(config, name_of(options.dtype)));
  // Last: a folder with an index has all that it names.
  if (files.size() > 1) {
    write_json(folder / ModelFiles::kIndex,
               {{"metadata", {{"total_size", made.bytes}}}, {"weight_map", places}});
  }
  return made;
}

}  // namespace language_model
