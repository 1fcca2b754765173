// Makes a write to a connection whose other end has gone an error of that write. Gloo and the store
// write without MSG_NOSIGNAL, so SIGPIPE would end this process, silently, before it can name the
// rank that was lost.
//
// Threads: holds for the thread that makes it, and for those started meanwhile as long as they live.
#pragma once

#include <csignal>
#include <ctime>

namespace zeropage::comm::detail {

class BrokenPipeScope {
 public:
  BrokenPipeScope() {
    sigemptyset(&broken_pipe_);
    sigaddset(&broken_pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken_pipe_, &before_);
  }
  ~BrokenPipeScope() {
    if (sigismember(&before_, SIGPIPE) != 0) return;
    // One that is pending would be delivered when the mask is put back.
    const timespec at_once{};
    sigtimedwait(&broken_pipe_, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BrokenPipeScope(const BrokenPipeScope&) = delete;
  BrokenPipeScope& operator=(const BrokenPipeScope&) = delete;

 private:
  sigset_t broken_pipe_;
  sigset_t before_;
};

}  // namespace zeropage::comm::detail
