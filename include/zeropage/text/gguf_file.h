// Reads a GGUF file, in which llama.cpp keeps a model: metadata, the tokenizer's vocabulary, and weights that are
// mostly quantised. Free of LibTorch.
//
//   const text::GgufFile file("model.gguf");
//   const int64_t width = file.integer("llama.embedding_length");
//   const text::GgufTensor& head = file.tensor("output.weight");  // {"output.weight", shape [49152, 576], ...}
//   file.read(head, 576, 576, row);                               // its second row, in fp32
//
// The file is mapped into memory, so opening it reads the header alone. What is handed out as a view lives as long
// as the GgufFile. The file must not be changed while it is open.
// Threads: any, at the same time.
// Throws TextError for a file that cannot be opened, is damaged, is cut off, or is big-endian. Opening takes memory in proportion
// to the header, whatever its counts say.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace zeropage::text {

// How the elements of a tensor are stored, by the numbers of the format.
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

// "Q4_1"; "type 99" for a number that has no name here.
std::string name_of(GgufType type);
// Whether read() knows the type.
bool can_read(GgufType type);

struct GgufTensor {
  std::string name = {};
  // Row-major, as LibTorch has it: the last size is the one whose elements lie next to each other. The file has
  // the sizes the other way round.
  std::vector<int64_t> shape = {};
  GgufType type = GgufType::kF32;
  int64_t numel = 0;
  uint64_t begin = 0;  // of its bytes, from the beginning of the file
  uint64_t bytes = 0;  // in the file
};

// An array of the metadata: `count` values of one of the format's types, as they lie in the file.
struct GgufArray {
  uint32_t type = 0;
  uint64_t count = 0;
  std::string_view bytes;
};

using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray>;

class GgufFile {
 public:
  // Versions 2 and 3.
  explicit GgufFile(const std::filesystem::path& path);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const std::string& name() const;  // its path, for errors
  uint32_t version() const;
  const std::map<std::string, GgufValue, std::less<>>& metadata() const;
  bool has(std::string_view key) const;

  // A value of the metadata. Each throws where the key is missing or has a value of another kind.
  int64_t integer(std::string_view key) const;
  double number(std::string_view key) const;  // an integer counts as one
  bool flag(std::string_view key) const;
  std::string_view string(std::string_view key) const;
  std::vector<int64_t> integers(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;
  std::vector<std::string_view> strings(std::string_view key) const;

  // In the file's order.
  const std::vector<GgufTensor>& tensors() const;
  bool has_tensor(std::string_view name) const;
  // Throws where there is none of that name.
  const GgufTensor& tensor(std::string_view name) const;

  // Writes elements [first, first + count) of a tensor of this file, counted in row-major order, as fp32.
  // Throws for elements that the tensor does not have, and for a type that can_read() does not know. Any range will do; a
  // block of 32 or 256 elements that the range cuts is unpacked whole.
  void read(const GgufTensor& tensor, int64_t first, int64_t count, float* out) const;

 private:
  class Contents;
  std::unique_ptr<const Contents> contents_;
};

}  // namespace zeropage::text
