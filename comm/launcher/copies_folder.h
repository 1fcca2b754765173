// A folder for copies of the training state that outlives the ranks but not their launcher: by default in the host's memory.
//
// Lifetime: the destructor removes the folder with all that is in it. A launcher that was killed leaves its folder, which the next one
// with the same parent finds unlocked, and removes.
// Threads: one. Throws: std::system_error, std::filesystem::filesystem_error.
#pragma once

#include <filesystem>

#include "comm/launcher/file_descriptor.h"

namespace zeropage::comm::detail {

class CopiesFolder {
 public:
  // In the folder `parent`, which exists.
  explicit CopiesFolder(const std::filesystem::path& parent);
  ~CopiesFolder();
  CopiesFolder(const CopiesFolder&) = delete;
  CopiesFolder& operator=(const CopiesFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  FileDescriptor lock_;
};

}  // namespace zeropage::comm::detail
