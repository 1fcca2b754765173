#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "zeropage/saved_state.h"

namespace zeropage::state {
namespace {

constexpr mode_t kMode = 0644;
// The kernel moves a little less than 2 GiB a call.
constexpr uint64_t kMostBytesACall = uint64_t{1} << 30;

template <typename Call>
auto again_if_interrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

int open_flags(File::Access access, bool direct) {
  int flags = O_CLOEXEC | (direct ? O_DIRECT : 0);
  if (access == File::Access::kRead) return flags | O_RDONLY;
  flags |= O_RDWR;
  return access == File::Access::kCreate ? flags | O_CREAT | O_EXCL : flags;
}

const char* what_to_do(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; make room on that disk";
    case EACCES:
    case EPERM:
      return "; this user may not";
    case EROFS:
      return "; it is mounted read-only";
    default:
      return "";
  }
}

}  // namespace

void throw_call_failed(const std::filesystem::path& path, const std::string& call, int error,
                       uint64_t offset) {
  throw StateError(path.string(), offset, call + ": " + std::strerror(error) + what_to_do(error));
}

File::File(const std::filesystem::path& path, Access access, bool direct)
    : name_(path.string()), direct_(direct) {
  descriptor_ = again_if_interrupted(
      [&] { return ::open(name_.c_str(), open_flags(access, direct), kMode); });
  if (descriptor_ < 0) throw_call_failed(path, "open", errno);
}

File::~File() {
  ::close(descriptor_);
}

void File::fail(const char* call, uint64_t offset, uint64_t bytes, int error) const {
  throw_call_failed(name_,
                    std::string(call) + " of " + std::to_string(bytes) + " bytes at byte " +
                        std::to_string(offset),
                    error, offset);
}

uint64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("fstat", 0, 0, errno);
  return static_cast<uint64_t>(status.st_size);
}

void File::read(uint64_t offset, char* to, uint64_t bytes) const {
  while (bytes > 0) {
    const auto done = again_if_interrupted([&] {
      return ::pread(descriptor_, to, std::min(bytes, kMostBytesACall), static_cast<off_t>(offset));
    });
    if (done < 0) fail("read", offset, bytes, errno);
    if (done == 0) {
      throw StateError(name_, offset, std::to_string(bytes) + " more bytes", "the end of the file",
                       "it was cut");
    }
    offset += static_cast<uint64_t>(done);
    to += done;
    bytes -= static_cast<uint64_t>(done);
  }
}

void File::write(uint64_t offset, const char* from, uint64_t bytes) {
  while (bytes > 0) {
    const auto done = again_if_interrupted([&] {
      return ::pwrite(descriptor_, from, std::min(bytes, kMostBytesACall),
                      static_cast<off_t>(offset));
    });
    if (done < 0) fail("write", offset, bytes, errno);
    auto written = static_cast<uint64_t>(done);
    // The next one must begin where direct access may.
    if (direct_) written -= written % kDirectAlignment;
    if (written == 0) fail("write", offset, bytes, ENOSPC);
    offset += written;
    from += written;
    bytes -= written;
  }
}

void File::allocate(uint64_t bytes) {
  if (bytes == 0) return;
  const auto length = static_cast<off_t>(bytes);
  if (again_if_interrupted([&] { return ::fallocate(descriptor_, 0, 0, length); }) == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS) fail("fallocate", 0, bytes, errno);
  if (again_if_interrupted([&] { return ::ftruncate(descriptor_, length); }) == 0) return;
  fail("ftruncate", 0, bytes, errno);
}

void File::sync() {
  if (again_if_interrupted([&] { return ::fsync(descriptor_); }) != 0) fail("fsync", 0, 0, errno);
}

bool takes_direct_access(const std::filesystem::path& file) {
  const int descriptor =
      again_if_interrupted([&] { return ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT); });
  if (descriptor < 0) return false;
  ::close(descriptor);
  return true;
}

void sync_directory(const std::filesystem::path& directory) {
  const int descriptor = again_if_interrupted(
      [&] { return ::open(directory.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY); });
  if (descriptor < 0) throw_call_failed(directory, "open", errno);
  const int failed = again_if_interrupted([&] { return ::fsync(descriptor); });
  const int error = errno;
  ::close(descriptor);
  if (failed != 0) throw_call_failed(directory, "fsync", error);
}

}  // namespace zeropage::state
