// The safetensors format (github.com/huggingface/safetensors): 8 bytes of little-endian length, a
// header in JSON of that length, and the tensors' bytes, in order and without holes.
//
//   {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// Free of torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "state/byte_source.h"

namespace zeropage::state {

enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64
};

uint64_t size_of(Dtype dtype);     // bytes an element
const char* name_of(Dtype dtype);  // as the format has it: "BF16"
// The dtype of that name; throws std::invalid_argument for other names.
Dtype dtype_of(const std::string& name);

struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<uint64_t> shape;  // empty: a scalar
  uint64_t begin = 0;           // of its bytes, from the beginning of the data
  uint64_t end = 0;

  bool operator==(const TensorEntry&) const = default;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // by their place
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // in the file

  bool operator==(const SafetensorsHeader&) const = default;
};

// Throws StateError for whatever the format does not allow: lengths that lie, names twice, holes,
// overlaps, sizes that are not those of dtype and shape, other keys or depths, and strings of more
// than 4096 bytes. Until all of it is found right, it allocates less than the file's size and 64 KiB.
SafetensorsHeader read_safetensors_header(const ByteSource& file);

// The first bytes of such a file: lengths, header, and spaces up to a multiple of 4096, where data
// then begins. The tensors' places are given by their order; `begin` and `end` are not read. The same
// tensors and metadata give the same bytes.
// Throws std::invalid_argument for a name twice, "" or "__metadata__", and for text that is no UTF-8.
std::string safetensors_prefix(const std::vector<TensorEntry>& tensors,
                               const std::map<std::string, std::string>& metadata);

// Gives the tensors their places, one after the other. Returns the bytes of all.
uint64_t place_in_order(std::vector<TensorEntry>& tensors);

// The bytes of its dtype and shape. Throws std::overflow_error where they are 2^64 or more.
uint64_t bytes_of(const TensorEntry& tensor);

}  // namespace zeropage::state
