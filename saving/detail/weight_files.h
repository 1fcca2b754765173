// Tensors by name in one or several safetensors files, whoever wrote them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "zeropage/saved_state.h"

namespace zeropage::detail {

class WeightFiles {
 public:
  // path: as of load_weights() in zeropage/saving.h. Reads headers, and of a state its checksums.
  // Throws state::StateError, also for a name in two files.
  explicit WeightFiles(const std::filesystem::path& path);

  struct Found {
    const state::TensorEntry* entry = nullptr;  // null: there is none of that name
    size_t file = 0;

    explicit operator bool() const { return entry != nullptr; }
  };
  // Also by a name under which a file's metadata ties it to another.
  Found find(const std::string& name) const;
  // All stored ones, by file and place.
  std::vector<std::string> names() const;
  // The tensor's bytes.
  void read(const Found& found, char* to) const;

 private:
  struct OneFile {
    state::SafetensorsHeader header;
    std::function<void(uint64_t begin, uint64_t end, char* to)> read;
  };

  void add_file(const std::filesystem::path& path);
  void add_indexed(const std::filesystem::path& index);
  void add_state(const std::filesystem::path& directory);
  void add(const std::string& name, OneFile file);

  std::vector<OneFile> files_;
  std::unordered_map<std::string, std::pair<size_t, size_t>> by_name_;  // file, place in it
};

}  // namespace zeropage::detail
