// Makes questions to the name service short.
//
// c10d looks up the name of every address that its store connects to, for its messages only. A question
// that gets no answer holds it up: by glibc's default 5 s, and 5 s again. A burst of ranks that start can
// lose one, and a host without a network has nobody who answers.
//
// Threads: holds for the thread that makes it.
#pragma once

#include <string>

namespace zeropage::comm::detail {

// For connections to that address, the calling thread asks once and waits for a second. What resolv.conf says
// holds again afterwards. Nothing changes where the address is a name, as it must be found first.
class ShortLookups {
 public:
  explicit ShortLookups(const std::string& address);
  ~ShortLookups();
  ShortLookups(const ShortLookups&) = delete;
  ShortLookups& operator=(const ShortLookups&) = delete;

 private:
  const bool holds_;
  int seconds_before_ = 0;
  int attempts_before_ = 0;
};

}  // namespace zeropage::comm::detail
