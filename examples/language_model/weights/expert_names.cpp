#include "language_model/weights/expert_names.h"

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace language_model {
namespace {

struct Matrix {
  const char* in_module;
  const char* of_mixtral;
  const char* of_qwen;
};
constexpr std::array<Matrix, 3> kMatrices = {
    {{"w_gate", "w1", "gate_proj"}, {"w_up", "w3", "up_proj"}, {"w_down", "w2", "down_proj"}}};
constexpr std::string_view kExperts = ".experts.";

// The matrix that a parameter of the module stacks; null for any other.
const Matrix* stacked_matrix(const std::string& parameter) {
  for (const Matrix& matrix : kMatrices) {
    if (parameter.ends_with(std::string(kExperts) + matrix.in_module)) return &matrix;
  }
  return nullptr;
}

// Sizes of one expert's matrix, from those of a stack of any number of experts.
std::vector<int64_t> sizes_of_one(at::IntArrayRef stack) {
  return stack.slice(1).vec();
}

std::string in_words(at::IntArrayRef sizes) {
  return c10::str(sizes);
}

}  // namespace

bool is_stack(const ModelConfig& config, const std::string& parameter) {
  return config.experts && stacked_matrix(parameter) != nullptr;
}

std::vector<FileTensor> tensors_in_files(const ModelConfig& config, const std::string& parameter,
                                         at::IntArrayRef sizes) {
  if (!config.experts) return {{parameter, sizes.vec()}};
  const std::string router = std::string(kExperts) + "router";
  if (parameter.ends_with(router)) {
    return {{parameter.substr(0, parameter.size() - router.size()) + ".gate.weight", sizes.vec()}};
  }
  const Matrix* const matrix = stacked_matrix(parameter);
  if (matrix == nullptr) return {{parameter, sizes.vec()}};
  const std::string prefix =
      parameter.substr(0, parameter.size() - std::string_view(matrix->in_module).size());
  const char* const end =
      config.architecture == Architecture::kMixtral ? matrix->of_mixtral : matrix->of_qwen;
  std::vector<FileTensor> tensors;
  for (int64_t expert = 0; expert < config.experts->count; ++expert) {
    tensors.push_back(
        {prefix + std::to_string(expert) + "." + end + ".weight", sizes_of_one(sizes)});
  }
  return tensors;
}

ExpertWeights::ExpertWeights(std::unique_ptr<zeropage::WeightsSource> source,
                             const ModelConfig& config)
    : source_(std::move(source)) {
  std::unordered_map<std::string, const Entry*> there;
  for (const Entry& entry : source_->tensors()) there.emplace(entry.name, &entry);
  std::set<std::string> known;
  std::string wrong;
  const auto add = [&](const std::string& parameter, const std::vector<int64_t>& sizes) {
    std::vector<const Entry*> parts;
    for (const FileTensor& tensor : tensors_in_files(config, parameter, sizes)) {
      known.insert(tensor.name);
      const auto at = there.find(tensor.name);
      if (at == there.end()) {
        wrong += "\n  missing in it: " + tensor.name;
      } else if (at->second->sizes != tensor.sizes) {
        wrong += "\n  " + tensor.name + ": expected sizes " + in_words(tensor.sizes) + ", got " +
                 in_words(at->second->sizes);
      } else if (!parts.empty() && parts.front()->dtype != at->second->dtype) {
        wrong += "\n  " + tensor.name + ": is of another dtype than " + parts.front()->name;
      } else {
        parts.push_back(at->second);
      }
    }
    if (parts.empty()) return;
    tensors_.push_back({.name = parameter, .sizes = sizes, .dtype = parts.front()->dtype});
    parts_.emplace(parameter, std::move(parts));
  };
  const ExpertsConfig& experts = config.experts.value();
  const int64_t d = config.width, width = experts.width, count = experts.count;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (!is_sparse(config, layer)) continue;
    const bool is_mixtral = config.architecture == Architecture::kMixtral;
    const std::string prefix = "model.layers." + std::to_string(layer) +
                               (is_mixtral ? ".block_sparse_moe" : ".mlp") + ".experts.";
    add(prefix + "router", {count, d});
    for (const char* matrix : {"w_gate", "w_up"}) add(prefix + matrix, {count, width, d});
    add(prefix + "w_down", {count, d, width});
  }
  if (!wrong.empty()) {
    throw std::runtime_error(source_->name() + ": the weights of experts are not those of " +
                             "config.json:" + wrong);
  }
  for (const Entry& entry : source_->tensors()) {
    if (known.contains(entry.name)) continue;
    tensors_.push_back(entry);
    parts_[entry.name] = {&entry};
  }
}

void ExpertWeights::read(const Entry& entry, int64_t first, const at::Tensor& to) {
  const std::vector<const Entry*>& parts = parts_.at(entry.name);
  const int64_t numel = c10::multiply_integers(entry.sizes) / static_cast<int64_t>(parts.size());
  for (int64_t done = 0; done < to.numel();) {
    const int64_t at = first + done, within = at % numel;
    const int64_t count = std::min(numel - within, to.numel() - done);
    source_->read(*parts[static_cast<size_t>(at / numel)], within, to.narrow(0, done, count));
    done += count;
  }
}

}  // namespace language_model
