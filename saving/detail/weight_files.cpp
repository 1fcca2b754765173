#include "saving/detail/weight_files.h"

#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "zeropage/saved_state.h"
#include "zeropage/state_error.h"
#include "zeropage/state_folder.h"

namespace zeropage::detail {
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

WeightFiles::WeightFiles(const fs::path& path) {
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
  OneFile one{.header = state::read_safetensors_header(*file), .read = nullptr};
  one.read = [file, data = one.header.data_begin](uint64_t begin, uint64_t end, char* to) {
    file->read(data + begin, to, end - begin);
  };
  add(file->name(), std::move(one));
}

void WeightFiles::add_indexed(const fs::path& index) {
  for (const std::string& file : files_in(index)) add_file(index.parent_path() / file);
}

void WeightFiles::add_state(const fs::path& directory) {
  const auto saved = std::make_shared<state::SavedState>(directory);
  saved->verify();
  const auto reader = std::make_shared<state::BlockReader>(saved->weights());
  add(saved->weights().name(), {.header = saved->weights().header(),
                                .read = [saved, reader](uint64_t begin, uint64_t end, char* to) {
                                  reader->read(begin, end, to);
                                }});
}

void WeightFiles::add(const std::string& name, OneFile file) {
  for (size_t place = 0; place < file.header.tensors.size(); ++place) {
    const std::string& tensor = file.header.tensors[place].name;
    if (by_name_.emplace(tensor, std::pair(files_.size(), place)).second) continue;
    throw StateError(name, 0, "\"" + tensor + "\" is in another file of the index too");
  }
  files_.push_back(std::move(file));
}

WeightFiles::Found WeightFiles::find(const std::string& name) const {
  const auto stored = [this](const std::string& by) -> Found {
    const auto at = by_name_.find(by);
    if (at == by_name_.end()) return {};
    const auto [file, place] = at->second;
    return {&files_[file].header.tensors[place], file};
  };
  if (const Found found = stored(name)) return found;
  for (const OneFile& file : files_) {
    const auto tied = file.header.metadata.find(name);
    if (tied != file.header.metadata.end()) return stored(tied->second);
  }
  return {};
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> names;
  for (const OneFile& file : files_) {
    for (const state::TensorEntry& tensor : file.header.tensors) names.push_back(tensor.name);
  }
  return names;
}

void WeightFiles::read(const Found& found, char* to) const {
  if (found.entry->begin == found.entry->end) return;
  files_[found.file].read(found.entry->begin, found.entry->end, to);
}

}  // namespace zeropage::detail
