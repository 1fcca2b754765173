// Weights from one safetensors file to another, under other names: what `zp state export` and `import`
// share.
//
// Memory: the largest tensor that is transposed, and some buffers of 4 MiB.
// Throws state::StateError for files, std::runtime_error for names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "state/block_checksums.h"
#include "tools/name_map.h"
#include "zeropage/saved_state.h"

namespace zeropage::tools {

// What becomes of names that the map has no entry for.
enum class Unmapped : uint8_t { kKeep, kLeaveOut, kRefuse };

struct CopiedTensor {
  state::TensorEntry from;
  state::TensorEntry to;
  bool transpose = false;
};

struct WeightsCopy {
  std::vector<CopiedTensor> tensors;            // by their place, in both
  std::map<std::string, std::string> metadata;  // {"format": "pt"} and tied names
  std::string prefix;                           // of the file that is written
  std::vector<std::string> left_out;            // tensors and tied names

  uint64_t file_bytes() const;
};

// The names under which the file has tensors once more, and those they are stored under: of its
// metadata, what names a tensor (safetensors.torch.save_model).
std::map<std::string, std::string> tied_names(const state::SafetensorsHeader& header);

struct Renaming {
  const NameMap& names;
  NameMap::Direction direction;
  Unmapped unmapped;
};
// file: for errors.
WeightsCopy plan_copy(const std::string& file, const state::SafetensorsHeader& header,
                      const Renaming& renaming);

// [begin, end) of the data, as of TensorEntry.
using ReadData = std::function<void(uint64_t begin, uint64_t end, char* to)>;

// Makes `file`'s bytes, which is there in its size, and waits until they are on the disk. Returns what was
// written, for its blocks' checksums.
state::PieceChecksums write_copy(const WeightsCopy& copy, const ReadData& read,
                                 const std::filesystem::path& file);

// A state's weights as a plain file. It gets its name when all of it is on the disk; a file of that name
// is replaced.
WeightsCopy export_weights(const std::filesystem::path& state, const std::filesystem::path& file,
                           const NameMap& names, Unmapped unmapped);

// A plain file as a state of weights alone. Throws where the folder has something.
WeightsCopy import_weights(const std::filesystem::path& file, const std::filesystem::path& state,
                           const Renaming& renaming, int64_t step);

}  // namespace zeropage::tools
