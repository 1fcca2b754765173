#include "saving/detail/weight_files.h"

#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "saving/detail/state_plan.h"
#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::saving {
namespace {

namespace fs = std::filesystem;
using state::StateError;

constexpr const char* kIndexEnd = ".index.json";

// The files that an index names, each once.
std::set<std::string> files_in(const fs::path& index) {
  std::ostringstream text;
  text << std::ifstream(index).rdbuf();
  const auto json = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  std::set<std::string> files;
  const bool has_map = json.is_object() && json.contains("weight_map");
  if (has_map && json["weight_map"].is_object()) {
    for (const auto& [tensor, file] : json["weight_map"].items()) {
      if (file.is_string()) files.insert(file.get<std::string>());
    }
  }
  if (files.empty()) {
    throw StateError(index.string(), 0,
                     "expected JSON with a \"weight_map\" of tensors' names to files' names; give "
                     "the safetensors file itself");
  }
  for (const std::string& file : files) {
    if (fs::path(file).filename() == file && file != "." && file != "..") continue;
    throw StateError(index.string(), 0,
                     "expected names of files beside it, got \"" + file + "\"; move it there");
  }
  return files;
}

}  // namespace

bool WeightFiles::is_plain(const fs::path& path) {
  return path.string().ends_with(kIndexEnd) || !fs::is_directory(path);
}

WeightFiles::WeightFiles(const fs::path& path) : name_(path.string()) {
  if (path.string().ends_with(kIndexEnd)) {
    add_indexed(path);
  } else if (fs::is_directory(path)) {
    add_state(state::find_state(path));
  } else {
    add_file(path);
  }
}

void WeightFiles::add_file(const fs::path& path) {
  const auto file = std::make_shared<state::File>(path, state::File::Access::kRead);
  const state::SafetensorsHeader header = state::read_safetensors_header(*file);
  add(file->name(), header,
      [file, data = header.data_begin](uint64_t begin, uint64_t end, char* to) {
        file->read(data + begin, to, end - begin);
      });
}

void WeightFiles::add_indexed(const fs::path& index) {
  for (const std::string& file : files_in(index)) add_file(index.parent_path() / file);
}

void WeightFiles::add_state(const fs::path& directory) {
  const auto saved = std::make_shared<state::SavedState>(directory);
  saved->verify();
  const auto reader = std::make_shared<state::BlockReader>(saved->weights());
  add(saved->weights().name(), saved->weights().header(),
      [saved, reader](uint64_t begin, uint64_t end, char* to) { reader->read(begin, end, to); });
}

void WeightFiles::add(const std::string& name, const state::SafetensorsHeader& header,
                      ReadBytes read) {
  for (const state::TensorEntry& tensor : header.tensors) {
    if (!places_.emplace(tensor.name, Place{files_.size(), tensor.begin}).second) {
      throw StateError(name, 0, "\"" + tensor.name + "\" is in another file of the index too");
    }
    tensors_.push_back({.name = tensor.name,
                        .sizes = {tensor.shape.begin(), tensor.shape.end()},
                        .dtype = scalar_type(tensor.dtype)});
  }
  // What the first file says.
  aliases_.insert(header.metadata.begin(), header.metadata.end());
  files_.push_back(std::move(read));
}

void WeightFiles::read(const Entry& entry, int64_t first, const at::Tensor& to) {
  if (to.numel() == 0) return;
  const Place& place = places_.at(entry.name);
  const uint64_t begin = place.begin + static_cast<uint64_t>(first * to.element_size());
  files_[place.file](begin, begin + to.nbytes(), static_cast<char*>(to.mutable_data_ptr()));
}

}  // namespace zeropage::saving
