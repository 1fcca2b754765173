// Files as the operating system has them, with errors that say which file, which call and why.
// Calls that a signal interrupts are made again. Free of torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "state/safetensors.h"

namespace zeropage::state {

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

}  // namespace zeropage::state
