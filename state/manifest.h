// manifest.json of a state: what belongs to it, and what is in its files block by block.
//
// Its own last line has its checksum, so no bit of a state is without one. Free of torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "state/safetensors.h"

namespace zeropage::state {

inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kWeightsFile = "weights.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
inline constexpr int64_t kFormatVersion = 1;

struct FileEntry {
  std::string name;  // kWeightsFile or kOptimizerFile
  uint64_t bytes = 0;
  std::vector<uint32_t> blocks;  // CRC-32C of each (block_checksums.h)

  bool operator==(const FileEntry&) const = default;
};

struct Manifest {
  int64_t step = 0;  // of the optimizer, made so far
  std::vector<FileEntry> files;
  // Whatever else is to be kept: an object.
  nlohmann::json content = nlohmann::json::object();

  // Null if it has none of that name.
  const FileEntry* file(const std::string& name) const;
};

// The same manifest gives the same bytes.
std::string to_text(const Manifest& manifest);

// Throws StateError unless each bit is as it was written. Until its checksum is found right, it
// allocates the file's size and less than 64 KiB.
Manifest read_manifest(const ByteSource& file);

}  // namespace zeropage::state
