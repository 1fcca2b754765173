// Whether states could be saved in a folder, before there are any.
//
// Threads: one; of a job's ranks, one. Throws StateError. Free of torch.
#pragma once

#include <cstdint>
#include <filesystem>

namespace zeropage::state {

// Throws where something else than a link lies under `latest`.
void check_latest(const std::filesystem::path& folder);

// A file that is written beside a folder's states to see whether states could be. Makes the folder, which
// stays, if it is not there; the file goes with the probe.
class FolderProbe {
 public:
  // Throws where the folder cannot be made, takes no file, or has something else under `latest`.
  explicit FolderProbe(const std::filesystem::path& folder);
  ~FolderProbe();
  FolderProbe(const FolderProbe&) = delete;
  FolderProbe& operator=(const FolderProbe&) = delete;

  const std::filesystem::path& file() const { return file_; }
  // Throws where this user may take less than that on the folder's file system.
  void check_room(uint64_t bytes) const;

 private:
  const std::filesystem::path folder_;
  const std::filesystem::path file_;
};
// Writes to a probe's file, from any process. Throws where it is not there or takes nothing.
void write_to_probe(const std::filesystem::path& file);

}  // namespace zeropage::state
