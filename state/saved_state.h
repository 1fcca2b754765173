// A state on disk: what it has, and its bytes, none of which is handed out before its block's checksum
// is found right.
//
//   const SavedState saved(find_state("run"));
//   const TensorEntry* weight = saved.weights().find("blocks.0.weight");
//   BlockReader(saved.weights()).read(weight->begin, weight->end, to);
//
// Opening reads the manifest and the headers. Threads: any, each with its own BlockReader.
// Throws StateError for whatever is not as it was written. Free of torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "state/file.h"
#include "state/manifest.h"
#include "state/safetensors.h"

namespace zeropage::state {

// A file of tensors whose blocks have checksums.
class TensorFile {
 public:
  TensorFile(const std::filesystem::path& path, const FileEntry& entry);

  const std::string& name() const { return file_.name(); }
  const SafetensorsHeader& header() const { return header_; }
  // Null if it has none of that name.
  const TensorEntry* find(const std::string& tensor) const;

  uint64_t bytes() const { return entry_.bytes; }
  uint64_t blocks() const { return entry_.blocks.size(); }
  // Reads a block of the file; `to` has room for kBlockBytes, or for the file if it is smaller. Returns the block's bytes.
  uint64_t read_block(uint64_t block, char* to) const;

 private:
  const FileEntry entry_;
  const File file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> by_name_;
};

// Reads stretches of the data; keeps the block it read last, for the next stretch.
class BlockReader {
 public:
  explicit BlockReader(const TensorFile& file);

  // Bytes [begin, end) behind the header: as of TensorEntry.
  void read(uint64_t begin, uint64_t end, char* to);

 private:
  const TensorFile& file_;
  std::vector<char> block_;
  std::optional<uint64_t> current_;
  uint64_t bytes_ = 0;  // of the current one
};

class SavedState {
 public:
  explicit SavedState(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  const TensorFile& weights() const { return *weights_; }
  // Null in a state of weights alone.
  const TensorFile* optimizer() const { return optimizer_.get(); }
  std::vector<const TensorFile*> files() const;

  // Reads blocks part, part + parts, ... of all files; so ranks may share the work. Returns the bytes
  // that it read. progress: is called with the bytes so far; may be empty.
  uint64_t verify(uint64_t part = 0, uint64_t parts = 1,
                  const std::function<void(uint64_t bytes)>& progress = nullptr) const;

 private:
  std::unique_ptr<TensorFile> open(const std::string& name) const;

  const std::filesystem::path directory_;
  const Manifest manifest_;
  std::unique_ptr<TensorFile> weights_;
  std::unique_ptr<TensorFile> optimizer_;
};

}  // namespace zeropage::state
