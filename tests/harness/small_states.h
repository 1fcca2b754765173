// States on disk with few tensors of known bytes, and folders for them. Free of torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "state/block_checksums.h"
#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::testing {

// A folder of its own, which goes with it.
class StateScratch {
 public:
  StateScratch() {
    static int folders = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("zeropage-state-test-" + std::to_string(::getpid()) + "-" + std::to_string(folders++));
    std::filesystem::create_directories(path_);
  }
  ~StateScratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  StateScratch(const StateScratch&) = delete;
  StateScratch& operator=(const StateScratch&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// What it refuses a state, a file or a folder with; "" if nothing.
template <typename Function>
std::string state_error_of(const Function& function) {
  try {
    function();
  } catch (const state::StateError& error) {
    return error.what();
  }
  return "";
}

inline std::string bytes_in(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void put_bytes(const std::filesystem::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}

template <typename T>
std::string bytes_of_values(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

struct SmallTensor {
  std::string name;
  std::vector<uint64_t> shape;
  std::string bytes;
  state::Dtype dtype = state::Dtype::kF32;
};

using SmallMetadata = std::map<std::string, std::string>;

// A file of these tensors in the format of safetensors.
inline std::string safetensors_bytes(const std::vector<SmallTensor>& tensors,
                                     const SmallMetadata& metadata = {{"format", "pt"}}) {
  std::vector<state::TensorEntry> entries;
  std::string data;
  for (const SmallTensor& tensor : tensors) {
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    data += tensor.bytes;
  }
  return state::safetensors_prefix(entries, metadata) + data;
}

struct SmallState {
  int64_t step = 20;
  std::vector<SmallTensor> weights;
  std::vector<SmallTensor> optimizer;  // none: a state of weights alone
  SmallMetadata metadata = {{"format", "pt"}};
  nlohmann::json content = nlohmann::json::object();
};

inline state::FileEntry add_file(state::NewState& made, const std::string& name,
                                 const std::string& bytes) {
  made.create_file(name, bytes.size());
  state::File file(made.directory() / name, state::File::Access::kWrite);
  file.write(0, bytes.data(), bytes.size());
  file.sync();
  state::PieceChecksums pieces;
  pieces.add(0, bytes.data(), bytes.size());
  return {name, bytes.size(), state::join_pieces(name, bytes.size(), pieces.pieces())};
}

inline void save(const SmallState& small, const std::filesystem::path& target,
                 bool update_latest = false) {
  state::NewState made(target);
  state::Manifest manifest{.step = small.step, .files = {}, .content = small.content};
  manifest.files.push_back(
      add_file(made, state::kWeightsFile, safetensors_bytes(small.weights, small.metadata)));
  if (!small.optimizer.empty()) {
    manifest.files.push_back(
        add_file(made, state::kOptimizerFile, safetensors_bytes(small.optimizer)));
  }
  made.commit(manifest, update_latest);
}

// What training leaves, with a matrix, a vector, a bf16 weight with its fp32 master, and a tied head.
inline SmallState trained_state(int64_t step = 20, float offset = 0) {
  const auto floats = [&](size_t numel) {
    std::vector<float> values(numel);
    for (size_t i = 0; i < numel; ++i) values[i] = offset + static_cast<float>(i) / 8;
    return bytes_of_values(values);
  };
  const std::string bf16 = bytes_of_values(std::vector<uint16_t>{0x3f80, 0xbf80, 0x4000, 0});
  const std::string updates = bytes_of_values(std::vector<int64_t>{step});
  SmallState small{.step = step, .weights = {}, .optimizer = {}, .metadata = {}, .content = {}};
  small.weights = {{"wte.weight", {4, 3}, floats(12)},
                   {"blocks.0.out.weight", {2, 3}, floats(6)},
                   {"blocks.0.out.bias", {2}, floats(2)},
                   {"half", {4}, bf16, state::Dtype::kBF16}};
  small.metadata = {{"format", "pt"}, {"head.weight", "wte.weight"}};
  nlohmann::json parameters;
  for (const SmallTensor& weight : small.weights) {
    parameters.push_back(weight.name);
    uint64_t numel = 1;
    for (const uint64_t extent : weight.shape) numel *= extent;
    small.optimizer.push_back({weight.name + ":step", {}, updates, state::Dtype::kI64});
    if (weight.dtype == state::Dtype::kBF16) {
      small.optimizer.push_back({weight.name + ":master", weight.shape, floats(numel)});
    }
    for (const char* state : {":exp_avg", ":exp_avg_sq"}) {
      small.optimizer.push_back({weight.name + state, weight.shape, floats(numel)});
    }
  }
  small.content = {
      {"optimizer",
       {{"class", "torch::optim::AdamW"},
        {"groups",
         {{{"options", {{"lr", 1e-3}, {"betas", {0.9, 0.999}}}}, {"parameters", parameters}}}},
        {"updates", step}}},
      {"progress", {{"samples", 32 * step}, {"values", {{"epoch", "1"}}}}},
      {"random", {{"axes", nlohmann::json::object()}, {"states", {"AAECAw=="}}}}};
  return small;
}

}  // namespace zeropage::testing
