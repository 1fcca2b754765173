#include "comm/shared_memory/shared_segment.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::comm::detail {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr const char* kSomebodyElse =
    "somebody else may have written to the store where ranks meet; see SECURITY.md";

void check_is_segment(const std::string& path, const struct stat& found, size_t bytes) {
  ZP_CHECK(S_ISREG(found.st_mode) && found.st_nlink == 0, path,
           " is not a shared segment: expected memory without a name; ", kSomebodyElse);
  ZP_CHECK(found.st_uid == geteuid(), path, " is not a shared segment of this user: expected user ",
           geteuid(), ", got ", found.st_uid, "; ", kSomebodyElse);
  ZP_CHECK(static_cast<size_t>(found.st_size) == bytes, path,
           " is not the shared segment of these ranks: expected ", bytes, " bytes, got ",
           found.st_size, "; ", kSomebodyElse);
}

}  // namespace

SharedSegment::SharedSegment(int fd, size_t bytes) : fd_(fd), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  if (data == MAP_FAILED) close_ticket();
  ZP_CHECK(data != MAP_FAILED, "mapping ", memory::format_bytes(static_cast<int64_t>(bytes)),
           " of shared memory: ", std::strerror(error));
  data_ = static_cast<std::byte*>(data);
}

SharedSegment SharedSegment::create(size_t bytes) {
  const int fd = memfd_create("zeropage", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ZP_CHECK(fd >= 0, "memfd_create: ", std::strerror(errno));
  // posix_fallocate returns the error and leaves errno alone.
  int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error == 0 && fcntl(fd, F_ADD_SEALS, kSizeSeals) != 0) error = errno;
  if (error != 0) close(fd);
  ZP_CHECK(error == 0, "allocating ", memory::format_bytes(static_cast<int64_t>(bytes)),
           " of shared memory: ", std::strerror(error));
  return {fd, bytes};
}

SharedSegment SharedSegment::open(const std::string& ticket, size_t bytes) {
  std::istringstream in(ticket);
  pid_t pid = 0;
  int number = -1;
  in >> pid >> number;
  ZP_CHECK(
      !in.fail() && in.eof() && pid > 0 && number >= 0,
      "the ticket of a shared segment is unreadable: expected a process and a descriptor, got \"",
      ticket, "\"; ranks of one world must run one version of Zeropage");
  const std::string path = c10::str("/proc/", pid, "/fd/", number);
  // Before it is opened: that alone would do something to a device or a pipe.
  struct stat found {};
  ZP_CHECK(stat(path.c_str(), &found) == 0, "opening ", path, ": ", std::strerror(errno));
  check_is_segment(path, found, bytes);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  ZP_CHECK(fd >= 0, "opening ", path, ": ", std::strerror(errno));
  SharedSegment segment;
  segment.fd_ = fd;
  ZP_CHECK(fstat(fd, &found) == 0, "opening ", path, ": ", std::strerror(errno));
  check_is_segment(path, found, bytes);
  // Only a memfd has seals; with these nobody can make it shorter under our mapping.
  ZP_CHECK((fcntl(fd, F_GET_SEALS) & kSizeSeals) == kSizeSeals && fcntl(fd, F_GET_SEALS) != -1,
           path, " is not a shared segment: expected a memfd of sealed size; ", kSomebodyElse);
  segment.fd_ = -1;
  SharedSegment opened(fd, bytes);
  opened.close_ticket();
  return opened;
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept {
  *this = std::move(other);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  std::swap(data_, other.data_);
  return *this;
}

SharedSegment::~SharedSegment() {
  close_ticket();
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::string SharedSegment::ticket() const {
  return c10::str(getpid(), " ", fd_);
}

void SharedSegment::close_ticket() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

}  // namespace zeropage::comm::detail
