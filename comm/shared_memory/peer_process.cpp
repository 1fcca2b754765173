#include "comm/shared_memory/peer_process.h"

#include <cerrno>
#include <fstream>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

namespace zeropage::comm::detail {
namespace {

// The letter in /proc/<pid>/stat, behind the name in brackets: R, S, T, Z...; 0 if there is none.
char state_letter(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(in, line);
  const size_t bracket = line.rfind(')');
  return bracket == std::string::npos || bracket + 2 >= line.size() ? '\0' : line[bracket + 2];
}

}  // namespace

PeerProcess::PeerProcess(pid_t pid) : pid_(pid) {
  if (pid != getpid()) pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

PeerProcess::PeerProcess(PeerProcess&& other) noexcept {
  *this = std::move(other);
}

PeerProcess& PeerProcess::operator=(PeerProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  return *this;
}

PeerProcess::~PeerProcess() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool PeerProcess::has_ended() const {
  if (pid_ == getpid()) return false;
  if (pidfd_ >= 0) {
    pollfd ended{pidfd_, POLLIN, 0};
    return poll(&ended, 1, /*timeout=*/0) > 0;
  }
  // Kernels before 5.3 have no pidfd.
  const char letter = state_letter(pid_);
  return letter == '\0' || letter == 'Z' || letter == 'X';
}

std::string PeerProcess::state() const {
  if (has_ended()) return "has ended";
  const char letter = state_letter(pid_);
  return letter == 'T' || letter == 't' ? "is stopped (SIGSTOP or a debugger)" : "is running";
}

int PeerProcess::read(uint64_t address, void* into, size_t bytes) const {
  auto* to = static_cast<char*>(into);
  while (bytes > 0) {
    iovec local{to, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t count = process_vm_readv(pid_, &local, 1, &remote, 1, /*flags=*/0);
    if (count < 0) return errno;
    if (count == 0) return EFAULT;
    to += count;
    address += static_cast<uint64_t>(count);
    bytes -= static_cast<size_t>(count);
  }
  return 0;
}

}  // namespace zeropage::comm::detail
