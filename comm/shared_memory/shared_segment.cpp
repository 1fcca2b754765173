#include "comm/shared_memory/shared_segment.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "memory/bytes.h"
#include "memory/check.h"

namespace zeropage::comm::detail {

SharedSegment::SharedSegment(int fd, size_t bytes) : fd_(fd), bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  if (data == MAP_FAILED) close_ticket();
  ZP_CHECK(data != MAP_FAILED, "mapping ", memory::format_bytes(static_cast<int64_t>(bytes)),
           " of shared memory: ", std::strerror(error));
  data_ = static_cast<std::byte*>(data);
}

SharedSegment SharedSegment::create(size_t bytes) {
  const int fd = memfd_create("zeropage", MFD_CLOEXEC);
  ZP_CHECK(fd >= 0, "memfd_create: ", std::strerror(errno));
  // posix_fallocate returns the error and leaves errno alone.
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error != 0) close(fd);
  ZP_CHECK(error == 0, "allocating ", memory::format_bytes(static_cast<int64_t>(bytes)),
           " of shared memory: ", std::strerror(error));
  return {fd, bytes};
}

SharedSegment SharedSegment::open(const std::string& ticket) {
  std::istringstream in(ticket);
  std::string path;
  size_t bytes = 0;
  in >> path >> bytes;
  ZP_CHECK(!in.fail(), "the ticket of a shared segment is unreadable: \"", ticket, "\"");
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ZP_CHECK(fd >= 0, "opening ", path, ": ", std::strerror(errno));
  SharedSegment segment(fd, bytes);
  segment.close_ticket();
  return segment;
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
  return c10::str("/proc/", getpid(), "/fd/", fd_, " ", bytes_);
}

void SharedSegment::close_ticket() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

}  // namespace zeropage::comm::detail
