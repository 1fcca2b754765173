#include "tools/state_difference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "state/block_checksums.h"
#include "tools/element_values.h"
#include "tools/state_words.h"
#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::tools {
namespace {

using nlohmann::json;
using namespace state;

constexpr size_t kMostLines = 40;

class ManifestDifference {
 public:
  // The smallest parts in which they differ.
  void compare(const std::string& path, const json& a, const json& b) {
    if (a == b) return;
    if (a.is_object() && b.is_object()) {
      std::set<std::string> keys;
      for (const auto& [key, value] : a.items()) keys.insert(key);
      for (const auto& [key, value] : b.items()) keys.insert(key);
      for (const auto& key : keys) {
        std::string inner = path;
        inner += path.empty() ? "" : ".";
        inner += key;
        compare(inner, member(a, key), member(b, key));
      }
    } else if (a.is_array() && b.is_array() && a.size() == b.size()) {
      for (size_t i = 0; i < a.size(); ++i) {
        compare(path + "[" + std::to_string(i) + "]", a[i], b[i]);
      }
    } else {
      found.push_back({{"path", path}, {"a", a}, {"b", b}});
    }
  }

  json found = json::array();

 private:
  static json member(const json& object, const std::string& key) {
    return object.contains(key) ? object[key] : json();
  }
};

json kind_of(const TensorEntry& tensor) {
  return {{"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}};
}

json metadata_of(const TensorFile* file) {
  return file == nullptr ? json() : json(file->header().metadata);
}

ElementDifference compare_elements(BlockReader& a, const TensorEntry& of_a, BlockReader& b,
                                   const TensorEntry& of_b) {
  const uint64_t bytes = of_a.end - of_a.begin;
  const uint64_t element = size_of(of_a.dtype);
  std::vector<char> from_a(std::min(bytes, kBlockBytes));
  std::vector<char> from_b(from_a.size());
  ElementDifference difference;
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t here = std::min<uint64_t>(from_a.size(), bytes - done);
    a.read(of_a.begin + done, of_a.begin + done + here, from_a.data());
    b.read(of_b.begin + done, of_b.begin + done + here, from_b.data());
    difference.add(of_a.dtype, done / element, here / element, from_a.data(), from_b.data());
    done += here;
  }
  return difference;
}

json compare_tensors(const TensorFile& a, const TensorFile& b) {
  json found{{"only_in_a", json::array()},
             {"only_in_b", json::array()},
             {"unlike", json::array()},
             {"different", json::array()}};
  BlockReader reader_a(a);
  BlockReader reader_b(b);
  uint64_t same = 0;
  for (const TensorEntry& of_a : a.header().tensors) {
    const TensorEntry* const of_b = b.find(of_a.name);
    if (of_b == nullptr) {
      found["only_in_a"].push_back(of_a.name);
      continue;
    }
    json row = kind_of(of_a);
    if (row != kind_of(*of_b)) {
      found["unlike"].push_back(
          {{"name", of_a.name}, {"a", std::move(row)}, {"b", kind_of(*of_b)}});
      continue;
    }
    const ElementDifference difference = compare_elements(reader_a, of_a, reader_b, *of_b);
    if (difference.numel == 0) {
      ++same;
      continue;
    }
    row["name"] = of_a.name;
    row["numel"] = (of_a.end - of_a.begin) / size_of(of_a.dtype);
    row["different_numel"] = difference.numel;
    row["first_index"] = *difference.first;
    row["without_distance_numel"] = difference.without_distance_numel;
    row["largest_difference"] =
        std::isinf(difference.largest) ? json() : json(static_cast<double>(difference.largest));
    found["different"].push_back(std::move(row));
  }
  for (const TensorEntry& of_b : b.header().tensors) {
    if (a.find(of_b.name) == nullptr) found["only_in_b"].push_back(of_b.name);
  }
  found["same_tensors"] = same;
  return found;
}

bool is_same(const json& file) {
  return file["only_in_a"].empty() && file["only_in_b"].empty() && file["unlike"].empty() &&
         file["different"].empty();
}

// Some lines, and how many more there are.
class Lines {
 public:
  template <typename... Words>
  void print(const char* format, Words... words) {
    if (++count_ <= kMostLines) std::printf(format, words...);
  }
  ~Lines() {
    if (count_ > kMostLines) {
      std::printf("  ... and %zu more; --json has all\n", count_ - kMostLines);
    }
  }

 private:
  size_t count_ = 0;
};

std::string kind_words(const json& kind) {
  return kind["dtype"].get<std::string>() + " " + kind["shape"].dump();
}

void print_file(const json& file) {
  std::printf("%s: %llu tensors the same\n", file["file"].get<std::string>().c_str(),
              static_cast<unsigned long long>(file["same_tensors"].get<uint64_t>()));
  Lines lines;
  for (const char* side : {"only_in_a", "only_in_b"}) {
    for (const json& name : file[side]) {
      lines.print("  %s: only in %s\n", printable(name).c_str(), side[8] == 'a' ? "A" : "B");
    }
  }
  for (const json& row : file["unlike"]) {
    lines.print("  %s: %s in A, %s in B\n", printable(row["name"]).c_str(),
                kind_words(row["a"]).c_str(), kind_words(row["b"]).c_str());
  }
  for (const json& row : file["different"]) {
    const json& largest = row["largest_difference"];
    const auto without = row["without_distance_numel"].get<uint64_t>();
    lines.print(
        "  %s: %s, %llu of %llu elements differ from index %llu on, by up to %s%s\n",
        printable(row["name"]).c_str(), kind_words(row).c_str(),
        row["different_numel"].get<unsigned long long>(), row["numel"].get<unsigned long long>(),
        row["first_index"].get<unsigned long long>(),
        largest.is_null() ? "infinity" : largest.dump().c_str(),
        without == 0
            ? ""
            : (", " + std::to_string(without) + " of them without a distance (NaN)").c_str());
  }
}

}  // namespace

json difference_of(const std::filesystem::path& path_a, const std::filesystem::path& path_b) {
  const SavedState a(find_state(path_a));
  const SavedState b(find_state(path_b));
  ManifestDifference manifest;
  manifest.compare("step", a.manifest().step, b.manifest().step);
  manifest.compare("", a.manifest().content, b.manifest().content);
  manifest.compare("weights.metadata", metadata_of(&a.weights()), metadata_of(&b.weights()));
  if (a.optimizer() == nullptr || b.optimizer() == nullptr) {
    manifest.compare(kOptimizerFile, a.optimizer() == nullptr ? json() : json("is there"),
                     b.optimizer() == nullptr ? json() : json("is there"));
  } else {
    manifest.compare("optimizer.metadata", metadata_of(a.optimizer()), metadata_of(b.optimizer()));
  }
  json files = json::array({compare_tensors(a.weights(), b.weights())});
  files[0]["file"] = kWeightsFile;
  if (a.optimizer() != nullptr && b.optimizer() != nullptr) {
    files.push_back(compare_tensors(*a.optimizer(), *b.optimizer()));
    files[1]["file"] = kOptimizerFile;
  }
  const bool same = manifest.found.empty() && std::all_of(files.begin(), files.end(), is_same);
  return {{"same", same},
          {"a", a.directory().string()},
          {"b", b.directory().string()},
          {"manifest", std::move(manifest.found)},
          {"files", std::move(files)}};
}

void print_difference(const json& difference) {
  std::printf("A: %s\nB: %s\n", difference["a"].get<std::string>().c_str(),
              difference["b"].get<std::string>().c_str());
  {
    Lines lines;
    for (const json& part : difference["manifest"]) {
      lines.print("%s: %s in A, %s in B\n", printable(part["path"]).c_str(),
                  in_short(part["a"]).c_str(), in_short(part["b"]).c_str());
    }
  }
  for (const json& file : difference["files"]) print_file(file);
  std::printf("%s\n", difference["same"] == true ? "the same, bit by bit" : "not the same");
}

}  // namespace zeropage::tools
