#include "tools/state_contents.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "state/block_checksums.h"
#include "tools/state_words.h"
#include "tools/weights_copy.h"
#include "zeropage/bytes.h"
#include "zeropage/saved_state.h"

namespace zeropage::tools {
namespace {

using nlohmann::json;
using namespace state;

constexpr size_t kMostDamageShown = 16;

unsigned long long count_of(const json& value) {
  return value.get<unsigned long long>();
}

json file_contents(const char* name, const FileEntry& entry, const TensorFile& file) {
  json found{{"name", name}, {"bytes", entry.bytes}, {"tensors", json::array()}};
  std::map<std::string, uint64_t> numel_by_dtype;
  uint64_t numel = 0;
  for (const TensorEntry& tensor : file.header().tensors) {
    const uint64_t bytes = tensor.end - tensor.begin;
    numel += bytes / size_of(tensor.dtype);
    numel_by_dtype[name_of(tensor.dtype)] += bytes / size_of(tensor.dtype);
    found["tensors"].push_back({{"name", tensor.name},
                                {"dtype", name_of(tensor.dtype)},
                                {"shape", tensor.shape},
                                {"bytes", bytes}});
  }
  found["numel"] = numel;
  found["numel_by_dtype"] = numel_by_dtype;
  return found;
}

void print_tensors_of(const json& file) {
  std::string dtypes;
  for (const auto& [dtype, numel] : file["numel_by_dtype"].items()) {
    dtypes += (dtypes.empty() ? "" : ", ") + dtype + " " + numel.dump();
  }
  std::printf("%s: %s, %zu tensors of %llu elements (%s)\n", text_of(file["name"]).c_str(),
              memory::format_bytes(static_cast<int64_t>(count_of(file["bytes"]))).c_str(),
              file["tensors"].size(), count_of(file["numel"]), dtypes.c_str());
}

void print_table(const json& file) {
  size_t widest = 0;
  for (const json& tensor : file["tensors"]) {
    widest = std::max(widest, printable(tensor["name"]).size());
  }
  std::printf("%s\n", text_of(file["name"]).c_str());
  for (const json& tensor : file["tensors"]) {
    std::printf("  %-*s  %-4s  %-16s %llu bytes\n", static_cast<int>(widest),
                printable(tensor["name"]).c_str(), text_of(tensor["dtype"]).c_str(),
                tensor["shape"].dump().c_str(), count_of(tensor["bytes"]));
  }
}

// Whoever wrote the manifest may have kept anything: nothing is expected of it.
json member(const json& value, const char* key) {
  return value.is_object() && value.contains(key) ? value[key] : json();
}

void print_optimizer(const json& optimizer) {
  std::printf("optimizer: %s, updates: %s\n", in_short(member(optimizer, "class")).c_str(),
              in_short(member(optimizer, "updates")).c_str());
  const json groups = member(optimizer, "groups");
  for (size_t i = 0; groups.is_array() && i < groups.size(); ++i) {
    const json parameters = member(groups[i], "parameters");
    std::printf("  group %zu: %zu parameters", i, parameters.is_array() ? parameters.size() : 0);
    const json options = member(groups[i], "options");
    for (const auto& [name, value] : options.items()) {
      std::printf(", %s %s", printable(name).c_str(), in_short(value).c_str());
    }
    std::printf("\n");
  }
}

void print_content(const json& content) {
  for (const auto& [name, value] : content.items()) {
    if (name == "optimizer") {
      print_optimizer(value);
    } else if (name == "random" && value.contains("states") && value["states"].is_array()) {
      std::printf("random: %zu generator states\n", value["states"].size());
    } else if (value.is_object()) {
      for (const auto& [key, part] : value.items()) {
        std::printf("%s.%s: %s\n", printable(name).c_str(), printable(key).c_str(),
                    in_short(part).c_str());
      }
    } else {
      std::printf("%s: %s\n", printable(name).c_str(), in_short(value).c_str());
    }
  }
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

json damage_of(const std::filesystem::path& state, const std::exception& error) {
  const auto* const found = dynamic_cast<const StateError*>(&error);
  return {{"file", found == nullptr ? state.string() : found->file()},
          {"offset", found == nullptr ? 0 : found->offset()},
          {"words", error.what()}};
}

json verify_state(const std::filesystem::path& state) {
  const auto begin = std::chrono::steady_clock::now();
  json damage = json::array();
  uint64_t bytes = 0;
  try {
    const SavedState saved(state);
    std::vector<char> block(kBlockBytes);
    for (const TensorFile* file : saved.files()) {
      for (uint64_t i = 0; i < file->blocks(); ++i) {
        try {
          bytes += file->read_block(i, block.data());
        } catch (const StateError& error) {
          damage.push_back(damage_of(state, error));
        }
      }
    }
  } catch (const std::exception& error) {
    damage.push_back(damage_of(state, error));
  }
  return {{"directory", state.string()},
          {"whole", damage.empty()},
          {"bytes", bytes},
          {"seconds", seconds_since(begin)},
          {"damage", std::move(damage)}};
}

std::string speed_words(const json& of) {
  const double seconds = of["seconds"].get<double>();
  const double bytes = of["bytes"].get<double>();
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "%llu bytes in %.3f s, %.2f GB/s", count_of(of["bytes"]),
                seconds, bytes / std::max(seconds, 1e-9) / 1e9);
  return text.data();
}

}  // namespace

json contents_of(const std::filesystem::path& state) {
  const SavedState saved(state);
  const Manifest& manifest = saved.manifest();
  json found{{"directory", saved.directory().string()},
             {"step", manifest.step},
             {"tied", tied_names(saved.weights().header())},
             {"content", manifest.content}};
  found["files"].push_back(
      file_contents(kWeightsFile, *manifest.file(kWeightsFile), saved.weights()));
  if (saved.optimizer() != nullptr) {
    found["files"].push_back(
        file_contents(kOptimizerFile, *manifest.file(kOptimizerFile), *saved.optimizer()));
  }
  return found;
}

void print_contents(const json& contents, TensorTable table) {
  std::printf("%s: step %llu%s\n", text_of(contents["directory"]).c_str(),
              count_of(contents["step"]), contents["files"].size() == 1 ? ", weights alone" : "");
  for (const json& file : contents["files"]) print_tensors_of(file);
  for (const auto& [name, stored] : contents["tied"].items()) {
    std::printf("tied: %s is %s\n", printable(name).c_str(), printable(stored).c_str());
  }
  print_content(contents["content"]);
  if (table == TensorTable::kLeftOut) return;
  for (const json& file : contents["files"]) print_table(file);
}

json verify(const std::vector<std::filesystem::path>& states) {
  json found{{"whole", true}, {"states", json::array()}};
  uint64_t bytes = 0;
  double seconds = 0;
  for (const auto& state : states) {
    json of_state = verify_state(state);
    bytes += of_state["bytes"].get<uint64_t>();
    seconds += of_state["seconds"].get<double>();
    if (of_state["whole"] == false) found["whole"] = false;
    found["states"].push_back(std::move(of_state));
  }
  found["bytes"] = bytes;
  found["seconds"] = seconds;
  found["bytes_per_second"] = static_cast<double>(bytes) / std::max(seconds, 1e-9);
  return found;
}

void print_verification(const json& verification) {
  for (const json& state : verification["states"]) {
    const json& damage = state["damage"];
    std::printf("%s: %s; %s\n", text_of(state["directory"]).c_str(),
                damage.empty() ? "as it was written" : "DAMAGED", speed_words(state).c_str());
    for (size_t i = 0; i < std::min(damage.size(), kMostDamageShown); ++i) {
      std::printf("  %s\n", text_of(damage[i]["words"]).c_str());
    }
    if (damage.size() > kMostDamageShown) {
      std::printf("  ... and %zu more; --json has all\n", damage.size() - kMostDamageShown);
    }
  }
  if (verification["states"].size() > 1) {
    std::printf("in all: %s\n", speed_words(verification).c_str());
  }
}

}  // namespace zeropage::tools
