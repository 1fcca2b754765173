#include "comm/launcher/copies_folder.h"

#include <cerrno>
#include <cstdlib>
#include <string>
#include <sys/file.h>
#include <system_error>

namespace zeropage::comm::detail {
namespace {

constexpr const char* kFolderPrefix = "zeropage-copies-";
constexpr const char* kLockFile = "lock";
constexpr int kMostFolders = 16;

// Nothing unless this process has it alone.
FileDescriptor lock_alone(const std::filesystem::path& file, int flags) {
  FileDescriptor lock(::open(file.c_str(), flags | O_RDWR | O_CLOEXEC, 0600));
  if (lock.is_open() && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) lock.reset();
  return lock;
}

// What cannot be removed is another user's, or in use.
void remove_leftovers(const std::filesystem::path& parent) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
    if (!entry.path().filename().string().starts_with(kFolderPrefix)) continue;
    // A launcher that is about to lock its folder has no file in it yet.
    const FileDescriptor lock = lock_alone(entry.path() / kLockFile, 0);
    if (lock.is_open()) std::filesystem::remove_all(entry.path(), ignored);
  }
}

}  // namespace

CopiesFolder::CopiesFolder(const std::filesystem::path& parent) {
  remove_leftovers(parent);
  for (int folder = 0; folder < kMostFolders && !lock_.is_open(); ++folder) {
    // Another launcher, which looks for leftovers, was the first to lock the one before, and removes it.
    std::error_code ignored;
    if (folder > 0) std::filesystem::remove_all(path_, ignored);
    std::string name = (parent / (std::string(kFolderPrefix) + "XXXXXX")).string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(),
                              "zeropage launcher: no folder for copies of the training state in " +
                                  parent.string() + " (name another one: --copies-in)");
    }
    path_ = name;
    lock_ = lock_alone(path_ / kLockFile, O_CREAT);
    // It may have removed the file between our open and our lock.
    if (lock_.is_open() && !std::filesystem::exists(path_ / kLockFile, ignored)) lock_.reset();
  }
}

CopiesFolder::~CopiesFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace zeropage::comm::detail
