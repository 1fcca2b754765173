// A saved state without a model: safetensors and manifests; `StateError`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

namespace zeropage::state {

// What is wrong with state on disk: which file, where in it, what was expected and what is there; or
// which call of the operating system failed, and why. Free of torch.
class StateError : public std::runtime_error {
 public:
  // offset: in the file, in bytes. what_to_do: "" or the end of the message.
  StateError(const std::string& file, uint64_t offset, const std::string& expected,
             const std::string& got, const std::string& what_to_do = "")
      : StateError(file, offset,
                   "byte " + std::to_string(offset) + ": expected " + expected + ", got " + got +
                       (what_to_do.empty() ? "" : "; " + what_to_do)) {}

  // what: the message without the file.
  StateError(const std::string& file, uint64_t offset, const std::string& what)
      : std::runtime_error(file + ": " + what), file_(file), offset_(offset) {}

  // The same error elsewhere, such as on another rank. message: as what() is to say it.
  static StateError as_said(const std::string& message, const std::string& file, uint64_t offset) {
    return {Said{message}, file, offset};
  }

  const std::string& file() const { return file_; }
  uint64_t offset() const { return offset_; }

 private:
  struct Said {
    const std::string& message;
  };
  StateError(const Said& said, const std::string& file, uint64_t offset)
      : std::runtime_error(said.message), file_(file), offset_(offset) {}

  std::string file_;
  uint64_t offset_;
};

// Where the bytes of a file come from. Free of what a file is, so that a parser's tests need none.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual const std::string& name() const = 0;  // for errors
  virtual uint64_t size() const = 0;            // in bytes
  // [offset, offset + bytes) of it, which are there. Throws where they cannot be read.
  virtual void read(uint64_t offset, char* to, uint64_t bytes) const = 0;
};

// The safetensors format (github.com/huggingface/safetensors): 8 bytes of little-endian length, a
// header in JSON of that length, and the tensors' bytes, in order and without holes.
//
//   {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//
// Free of torch.
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
  std::string name = {};
  Dtype dtype = Dtype::kF32;
  std::vector<uint64_t> shape = {};  // empty: a scalar
  uint64_t begin = 0;                // of its bytes, from the beginning of the data
  uint64_t end = 0;

  bool operator==(const TensorEntry&) const = default;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors = {};  // by their place
  std::map<std::string, std::string> metadata = {};
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

// Files as the operating system has them, with errors that say which file, which call and why.
// Calls that a signal interrupts are made again. Free of torch.
// What direct access wants offsets, sizes and memory to be multiples of.
inline constexpr uint64_t kDirectAlignment = 4096;

class File final : public ByteSource {
 public:
  enum class Access : uint8_t {
    kRead,
    kWrite,   // of a file that exists
    kCreate,  // a file that does not exist
  };

  // direct: past the page cache. Then offsets, sizes and memory are multiples of kDirectAlignment.
  // Throws StateError.
  File(const std::filesystem::path& path, Access access, bool direct = false);
  ~File() override;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& name() const override { return name_; }
  uint64_t size() const override;
  void read(uint64_t offset, char* to, uint64_t bytes) const override;
  void write(uint64_t offset, const char* from, uint64_t bytes);
  // Takes the room at once, so that a full disk says so before anything is written. Where the file
  // system cannot, the file only gets its size.
  void allocate(uint64_t bytes);
  // Waits until it is on the disk.
  void sync();

 private:
  [[noreturn]] void fail(const char* call, uint64_t offset, uint64_t bytes, int error) const;

  const std::string name_;
  const bool direct_;
  int descriptor_ = -1;
};

// Whether the file system takes direct access to that file.
bool takes_direct_access(const std::filesystem::path& file);

// Waits until the names in it are on the disk.
void sync_directory(const std::filesystem::path& directory);

// Throws StateError: "path: call: why; what to do".
[[noreturn]] void throw_call_failed(const std::filesystem::path& path, const std::string& call,
                                    int error, uint64_t offset = 0);

// manifest.json of a state: what belongs to it, and what is in its files block by block.
//
// Its own last line has its checksum, so no bit of a state is without one. Free of torch.
inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kWeightsFile = "weights.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
inline constexpr int64_t kFormatVersion = 1;

struct FileEntry {
  std::string name = {};  // kWeightsFile or kOptimizerFile
  uint64_t bytes = 0;
  std::vector<uint32_t> blocks = {};  // CRC-32C of each (block_checksums.h)

  bool operator==(const FileEntry&) const = default;
};

struct Manifest {
  int64_t step = 0;  // of the optimizer, made so far
  std::vector<FileEntry> files = {};
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

// A state on disk: what it has, and its bytes, none of which is handed out before its block's checksum
// is found right.
//
//   const SavedState saved(find_state("run"));
//   const TensorEntry* weight = saved.weights().find("blocks.0.weight");
//   BlockReader(saved.weights()).read(weight->begin, weight->end, to);
//
// Opening reads the manifest and the headers. Threads: any, each with its own BlockReader.
// Throws StateError for whatever is not as it was written. Free of torch.
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
