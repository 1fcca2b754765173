// Names of tensors here, and what others call them: what `zp state export` and `import` translate by.
//
//   {"token_embedding.weight": "wte.weight",
//    "blocks.*.attention_qkv.weight": {"name": "h.*.attn.c_attn.weight", "transpose": true}}
//
// Our name is the key. A `*` stands for a run of digits, the same on both sides; the first of one side is
// the first of the other. transpose: of two dimensions, the one stands in the other's place.
// Throws std::runtime_error, with the file's name, what was expected and what is there.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace zeropage::tools {

class NameMap {
 public:
  enum class Direction : uint8_t { kToTheirs, kToOurs };
  struct Renamed {
    std::string name;
    bool transpose = false;
  };

  // Without entries.
  NameMap() = default;
  explicit NameMap(const std::filesystem::path& file);

  // The new name; nothing if no entry fits. Throws if two do.
  std::optional<Renamed> rename(const std::string& name, Direction direction) const;

 private:
  struct Entry {
    std::string ours;
    std::string theirs;
    bool transpose = false;
  };

  Entry entry_of(const std::string& ours, const nlohmann::json& value) const;
  void check_unique(const Entry& entry) const;
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const;

  std::string file_;
  std::vector<Entry> entries_;
};

// What each `*` of the pattern stands for in the name; nothing if it does not fit.
std::optional<std::vector<std::string>> digits_in(std::string_view name, std::string_view pattern);

}  // namespace zeropage::tools
