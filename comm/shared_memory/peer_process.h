// A process of this host that may end without a word, and whose memory can be read.
//
// Threads: const after construction. Throws: nothing but what is said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <sys/types.h>

namespace zeropage::comm::detail {

class PeerProcess {
 public:
  PeerProcess() = default;
  // REQUIRES: it runs now, and is not a child of ours that we reap.
  explicit PeerProcess(pid_t pid);
  PeerProcess(PeerProcess&& other) noexcept;
  PeerProcess& operator=(PeerProcess&& other) noexcept;
  ~PeerProcess();

  pid_t pid() const { return pid_; }
  // Also true for a process that its parent has not reaped yet. Never true for our own.
  bool has_ended() const;
  // "is running", "is stopped (SIGSTOP or a debugger)", "has ended".
  std::string state() const;

  // Copies `bytes` from the process's address to ours, in one copy by the kernel. Returns 0, or the
  // errno: EPERM where it is not allowed, ESRCH or EFAULT where the process has ended.
  int read(uint64_t address, void* into, size_t bytes) const;

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
};

}  // namespace zeropage::comm::detail
