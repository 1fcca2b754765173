// A preallocated file that is gone when its object is.
//
// Its name ends in six random characters, so that nobody can put a file or a link there beforehand.
// The file is locked (flock) while it lives: what a killed process left under the same name is not,
// and is removed.
//
// Threads: the descriptor is anybody's; the rest is constant.
// Throws: the constructor with figures.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace zeropage::offload::detail {

class ScratchFile {
 public:
  // name: without a directory; what the file's name begins with. owner: what it is for, in messages.
  // bytes: preallocated.
  ScratchFile(const std::string& directory, const std::string& name, const std::string& owner,
              int64_t bytes);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }
  // Preallocates `bytes` more; false where there is no room. One caller at a time.
  bool grow(int64_t bytes);
  // Reads and writes go past the page cache, in multiples of 4096.
  bool direct() const { return direct_; }

 private:
  void create_locked(const std::string& owner);
  void preallocate(const std::string& directory, const std::string& owner);
  bool make_room(int64_t first, int64_t bytes);
  bool make_direct();

  std::string path_;
  std::atomic<int64_t> bytes_;
  int descriptor_ = -1;
  bool direct_ = false;
};

}  // namespace zeropage::offload::detail
