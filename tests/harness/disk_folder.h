// A folder on the disk that the build is on, where /tmp may be in memory. Gone with the object.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>
#include <unistd.h>

namespace zeropage::testing {

class DiskFolder {
 public:
  DiskFolder() {
    static std::atomic<int> made = 0;
    path_ = std::filesystem::current_path() /
            ("test-folder-" + std::to_string(::getpid()) + "-" + std::to_string(made++));
    std::filesystem::create_directories(path_);
  }
  ~DiskFolder() { std::filesystem::remove_all(path_); }
  DiskFolder(const DiskFolder&) = delete;
  DiskFolder& operator=(const DiskFolder&) = delete;

  std::string path() const { return path_.string(); }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

}  // namespace zeropage::testing
