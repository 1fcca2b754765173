#include "offload/detail/scratch_file.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <linux/magic.h>
#include <memory>
#include <string_view>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <system_error>
#include <unistd.h>

#include "offload/nvme_options.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::offload::detail {
namespace {

using memory::format_bytes;

constexpr std::string_view kRandomPart = ".XXXXXX";

void check_directory(const std::string& directory, const std::string& owner) {
  struct stat found {};
  ZP_CHECK(::stat(directory.c_str(), &found) == 0, "directory \"", directory, "\" for ", owner,
           ": ", std::strerror(errno), "; make it, or name one on a disk");
  ZP_CHECK(S_ISDIR(found.st_mode), "directory \"", directory, "\" for ", owner,
           ": it is a file; name a directory on a disk");
  struct statfs system {};
  ZP_CHECK(::statfs(directory.c_str(), &system) == 0, "directory \"", directory, "\" for ", owner,
           ": statfs: ", std::strerror(errno));
  const auto type = static_cast<unsigned long>(system.f_type);
  ZP_CHECK(type != TMPFS_MAGIC && type != RAMFS_MAGIC, "directory \"", directory, "\" for ", owner,
           " is on ", type == TMPFS_MAGIC ? "tmpfs" : "ramfs",
           ", which is host memory: nothing would leave memory; name a directory on a disk, or keep"
           " it on the host openly");
}

bool is_named_once(int descriptor) {
  struct stat found {};
  return ::fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode) &&
         found.st_uid == ::geteuid() && found.st_nlink == 1;
}

// What killed processes left in `directory` under `name`, so that it does not add up. Only files of
// this user, with one name, that nobody holds.
void remove_leftovers(const std::string& directory, const std::string& name) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string found = entry.path().filename();
    if (found.size() != name.size() + kRandomPart.size() || !found.starts_with(name + "."))
      continue;
    const int descriptor =
        ::open(entry.path().c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) continue;
    if (is_named_once(descriptor) && ::flock(descriptor, LOCK_EX | LOCK_NB) == 0) {
      ::unlink(entry.path().c_str());
    }
    ::close(descriptor);
  }
}

}  // namespace

ScratchFile::ScratchFile(const std::string& directory, const std::string& name,
                         const std::string& owner, int64_t bytes)
    : path_(directory + "/" + name), bytes_(bytes) {
  check_directory(directory, owner);
  ZP_CHECK(!name.empty() && name.find('/') == std::string::npos, "file \"", name, "\" for ", owner,
           ": expected a name without a directory");
  remove_leftovers(directory, name);
  create_locked(owner);
  try {
    preallocate(directory, owner);
  } catch (...) {
    ::unlink(path_.c_str());
    ::close(descriptor_);
    throw;
  }
  direct_ = make_direct();
}

ScratchFile::~ScratchFile() {
  ::unlink(path_.c_str());
  ::close(descriptor_);
}

void ScratchFile::create_locked(const std::string& owner) {
  const std::string pattern = path_ + std::string(kRandomPart);
  for (;;) {
    path_ = pattern;
    descriptor_ = ::mkostemp(path_.data(), O_CLOEXEC);
    ZP_CHECK(descriptor_ >= 0, "file \"", pattern, "\" for ", owner,
             " cannot be made: ", std::strerror(errno), "; name a directory that can be written");
    const bool locked = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
    const int error = errno;
    if (locked && is_named_once(descriptor_)) return;
    // A process that removes leftovers may have come between the two calls.
    ::unlink(path_.c_str());
    ::close(descriptor_);
    ZP_CHECK(locked || error == EWOULDBLOCK, "file \"", path_, "\" for ", owner,
             " cannot be locked: ", std::strerror(error),
             "; name a directory of another file system");
  }
}

void ScratchFile::preallocate(const std::string& directory, const std::string& owner) {
  struct statvfs room {};
  ZP_CHECK(::statvfs(directory.c_str(), &room) == 0, "directory \"", directory, "\" for ", owner,
           ": statvfs: ", std::strerror(errno));
  const auto available = static_cast<int64_t>(room.f_bavail * room.f_frsize);
  const auto too_little = [&] {
    ZP_THROW("directory \"", directory, "\" has too little room for ", owner, ": expected ",
             format_bytes(bytes_), ", got ", format_bytes(available),
             "; free some, name another directory, or use more ranks");
  };
  if (bytes_ > available) too_little();
  if (!make_room(0, bytes_)) too_little();
}

bool ScratchFile::grow(int64_t bytes) {
  // An allocation that fails may have taken what room there was.
  struct statvfs room {};
  const bool is_known = ::fstatvfs(descriptor_, &room) == 0;
  if (is_known && static_cast<int64_t>(room.f_bavail * room.f_frsize) < bytes) return false;
  if (!make_room(bytes_, bytes)) {
    ZP_CHECK(::ftruncate(descriptor_, bytes_) == 0, "file \"", path_,
             "\": its room cannot be given back: ", std::strerror(errno));
    return false;
  }
  bytes_ += bytes;
  return true;
}

bool ScratchFile::make_room(int64_t first, int64_t bytes) {
  if (bytes == 0) return true;
  const int error = ::posix_fallocate(descriptor_, first, bytes);
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) return false;
  ZP_CHECK(error == 0, "file \"", path_, "\": ", format_bytes(bytes),
           " cannot be preallocated: ", std::strerror(error));
  return true;
}

bool ScratchFile::make_direct() {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (::fcntl(descriptor_, F_SETFL, flags | O_DIRECT) != 0) return false;
  // Some file systems take the flag and refuse the read.
  const std::unique_ptr<void, void (*)(void*)> block(
      std::aligned_alloc(kNvmeAlignment, kNvmeAlignment), std::free);
  if (::pread(descriptor_, block.get(), kNvmeAlignment, 0) >= 0) return true;
  ::fcntl(descriptor_, F_SETFL, flags);
  return false;
}

}  // namespace zeropage::offload::detail
