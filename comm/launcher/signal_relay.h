// Turns the signals a launcher cares about into events on a pipe that poll() can wait for. Handlers
// and a pipe rather than signalfd or pidfds: they work when the process has other threads, and on
// kernels older than 5.3.
//
// Lifetime: handlers are installed for the life of the object and put back afterwards; one object
// at a time in a process (a signal handler can reach only a global). A forked child must call
// restore_in_child() first thing.
// Threads: handlers may run on any thread; everything else on the launcher's. Signals that were
// ignored (nohup, a shell's background job) stay ignored.
// Throws: the constructor, std::runtime_error.
#pragma once

#include <array>
#include <csignal>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include "comm/launcher/file_descriptor.h"

namespace zeropage::comm::detail {

struct SignalEvent {
  int signal = 0;
  pid_t sender = 0;  // SIGCHLD: the child that ended; of several at once the kernel keeps the first
};

class SignalRelay {
 public:
  static constexpr std::array kSignals = {SIGCHLD, SIGINT,  SIGTERM, SIGHUP,
                                          SIGQUIT, SIGPIPE, SIGTSTP};

  SignalRelay();
  ~SignalRelay();
  SignalRelay(const SignalRelay&) = delete;
  SignalRelay& operator=(const SignalRelay&) = delete;

  // Readable when take() has something.
  int fd() const { return events_.read_end.get(); }

  // All events since the last call, in the order they came.
  std::vector<SignalEvent> take();

  // Gives a forked child the handlers and the mask that the caller of the launcher had, and lets go
  // of the pipe.
  void restore_in_child() noexcept;

 private:
  void restore() noexcept;

  Pipe events_;
  std::array<struct sigaction, kSignals.size()> previous_{};
  sigset_t previous_mask_{};
};

// "SIGKILL" for 9; "signal 42" for what has no common name.
std::string signal_name(int signal);

}  // namespace zeropage::comm::detail
