#include "comm/launcher/signal_relay.h"

#include <atomic>
#include <stdexcept>

namespace zeropage::comm::detail {
namespace {

// The only thing a handler can find.
std::atomic<int> active_pipe{-1};
static_assert(std::atomic<int>::is_always_lock_free);

void relay_signal(int signal, siginfo_t* info, void* /*context*/) {
  const int saved_errno = errno;
  const SignalEvent event{signal, info->si_pid};
  // A full pipe already wakes the loop, so a lost event costs nothing but the order of the ends.
  [[maybe_unused]] const ssize_t written = ::write(active_pipe.load(), &event, sizeof(event));
  errno = saved_errno;
}

}  // namespace

SignalRelay::SignalRelay() : events_(make_pipe("signals")) {
  set_nonblocking(events_.read_end);
  set_nonblocking(events_.write_end);
  int expected = -1;
  if (!active_pipe.compare_exchange_strong(expected, events_.write_end.get())) {
    throw std::runtime_error(
        "zeropage launcher: this process is already running a launch, and signals can serve only "
        "one at a time; wait for the first to return");
  }
  struct sigaction action {};
  action.sa_sigaction = relay_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NOCLDSTOP;
  sigfillset(&action.sa_mask);
  sigset_t unblocked;
  sigemptyset(&unblocked);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &previous_[i]);
    // Ignoring SIGCHLD would make the kernel throw exit codes away, so that one is always ours.
    if (previous_[i].sa_handler == SIG_IGN && kSignals[i] != SIGCHLD) continue;
    ::sigaction(kSignals[i], &action, nullptr);
    sigaddset(&unblocked, kSignals[i]);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &unblocked, &previous_mask_);
}

SignalRelay::~SignalRelay() {
  restore();
}

std::vector<SignalEvent> SignalRelay::take() {
  std::vector<SignalEvent> events;
  SignalEvent event;
  // A write of this size to a pipe is atomic, so a read finds whole events.
  while (::read(events_.read_end.get(), &event, sizeof(event)) == sizeof(event)) {
    events.push_back(event);
  }
  return events;
}

void SignalRelay::restore_in_child() noexcept {
  restore();
  events_ = Pipe{};
}

void SignalRelay::restore() noexcept {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &previous_[i], nullptr);
  }
  ::pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
  active_pipe.store(-1);
}

std::string signal_name(int signal) {
  switch (signal) {
    case SIGHUP:
      return "SIGHUP";
    case SIGINT:
      return "SIGINT";
    case SIGQUIT:
      return "SIGQUIT";
    case SIGILL:
      return "SIGILL";
    case SIGTRAP:
      return "SIGTRAP";
    case SIGABRT:
      return "SIGABRT";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGKILL:
      return "SIGKILL";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGUSR2:
      return "SIGUSR2";
    case SIGPIPE:
      return "SIGPIPE";
    case SIGALRM:
      return "SIGALRM";
    case SIGTERM:
      return "SIGTERM";
    case SIGXCPU:
      return "SIGXCPU";
    case SIGXFSZ:
      return "SIGXFSZ";
    case SIGSYS:
      return "SIGSYS";
    default:
      return "signal " + std::to_string(signal);
  }
}

}  // namespace zeropage::comm::detail
