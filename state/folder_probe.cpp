#include "state/folder_probe.h"

#include <cerrno>
#include <string>
#include <sys/statvfs.h>
#include <system_error>
#include <unistd.h>

#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::state {
namespace {

constexpr uint64_t kProbeBytes = 4096;

}  // namespace

void check_latest(const std::filesystem::path& folder) {
  const std::filesystem::path latest = folder / kLatest;
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::symlink_status(latest, error);
  if (!std::filesystem::status_known(status)) throw_call_failed(latest, "lstat", error.value());
  if (std::filesystem::exists(status) && !std::filesystem::is_symlink(status)) {
    throw StateError(latest.string(), 0,
                     "expected a symbolic link, got something else; move it away");
  }
}

FolderProbe::FolderProbe(const std::filesystem::path& folder)
    : folder_(std::filesystem::absolute(folder).lexically_normal()),
      file_(folder_ / ".probe.writing") {
  make_folders(folder_);
  check_latest(folder_);
  // Left by a run that died.
  ::unlink(file_.c_str());
  File(file_, File::Access::kCreate).allocate(kProbeBytes);
}

FolderProbe::~FolderProbe() {
  ::unlink(file_.c_str());
}

void FolderProbe::check_room(uint64_t bytes) const {
  struct statvfs status {};
  if (::statvfs(folder_.c_str(), &status) != 0) throw_call_failed(folder_, "statvfs", errno);
  const uint64_t available = static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
  if (available >= bytes) return;
  throw StateError(folder_.string(), 0,
                   "expected room for a state of " + std::to_string(bytes) + " bytes, got " +
                       std::to_string(available) +
                       " bytes free on its file system; make room there, or give another folder");
}

void write_to_probe(const std::filesystem::path& file) {
  const std::string bytes(kProbeBytes, 'p');
  File probe(file, File::Access::kWrite);
  probe.write(0, bytes.data(), bytes.size());
  probe.sync();
}

}  // namespace zeropage::state
