// Tensors by name in one or several safetensors files, whoever wrote them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "zeropage/saved_state.h"
#include "zeropage/saving.h"

namespace zeropage::saving {

class WeightFiles final : public WeightsSource {
 public:
  // path: as of load_weights() in zeropage/saving.h. Reads headers, and of a state its checksums.
  // Throws state::StateError, also for a name in two files.
  explicit WeightFiles(const std::filesystem::path& path);

  std::string name() const override { return name_; }
  // By file and place.
  const std::vector<Entry>& tensors() const override { return tensors_; }
  // Those that the files' metadata tie to others.
  std::map<std::string, std::string> aliases() const override { return aliases_; }
  void read(const Entry& entry, int64_t first, const at::Tensor& to) override;

  // Whether path is such a file or an index of some, and no folder of states.
  static bool is_plain(const std::filesystem::path& path);

 private:
  using ReadBytes = std::function<void(uint64_t begin, uint64_t end, char* to)>;
  struct Place {
    size_t file = 0;
    uint64_t begin = 0;  // of its bytes, from the beginning of the file's data
  };

  void add_file(const std::filesystem::path& path);
  void add_indexed(const std::filesystem::path& index);
  void add_state(const std::filesystem::path& directory);
  void add(const std::string& name, const state::SafetensorsHeader& header, ReadBytes read);

  const std::string name_;
  std::vector<Entry> tensors_;
  std::map<std::string, std::string> aliases_;
  std::vector<ReadBytes> files_;
  std::unordered_map<std::string, Place> places_;
};

}  // namespace zeropage::saving
