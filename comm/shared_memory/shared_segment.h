// Memory that processes of one host map together.
//
// It is a memfd, reached by the others through /proc/<pid>/fd: it has no name, so nothing is left
// behind however its users end, and it is not bounded by the size of /dev/shm (64 MiB in a
// container by default). All of it is allocated when it is made, because a page that cannot be had
// later is a SIGBUS, and its size is sealed.
//
// A ticket comes from a store that others may write to. It holds numbers alone, and what they lead to is
// mapped only if it is a memfd of this user with the expected size.
//
// Lifetime: the mapping lives as long as the object; the memory as long as any mapping.
// Throws: c10::Error with the reason of the system.
#pragma once

#include <cstddef>
#include <string>

namespace zeropage::comm::detail {

class SharedSegment {
 public:
  SharedSegment() = default;
  static SharedSegment create(size_t bytes);
  // ticket: what the maker's ticket() said; bytes: what it was made with. Throws unless it leads to a
  // segment of this user that is so long.
  static SharedSegment open(const std::string& ticket, size_t bytes);

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  // How other processes find it, until close_ticket().
  std::string ticket() const;
  void close_ticket();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  SharedSegment(int fd, size_t bytes);

  int fd_ = -1;
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace zeropage::comm::detail
