#include "comm/launcher/rank_process.h"

#include <cstring>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <utility>

namespace zeropage::comm::detail {
namespace {

// What the child of one fork works with.
struct ChildSide {
  const RankStart& start;
  SignalRelay& relay;
  pid_t launcher;
  int status;
  int standard_output;
  int standard_error;
};

[[noreturn]] void run_child(const ChildSide& side) noexcept {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before the line above took effect.
  if (::getppid() != side.launcher) ::_exit(128 + SIGKILL);
  // A session and not just a group: a background group would be stopped for reading from, or
  // drawing on, a terminal.
  ::setsid();
  for (const int fd : side.start.close_in_child) ::close(fd);
  if (side.start.input == RankStart::Input::kNothing || ::isatty(STDIN_FILENO)) {
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(nothing, STDIN_FILENO);
    ::close(nothing);
  }
  if (side.start.streams == RankStart::Streams::kPiped) {
    ::dup2(side.standard_output, STDOUT_FILENO);
    ::dup2(side.standard_error, STDERR_FILENO);
    ::close(side.standard_output);
    ::close(side.standard_error);
  }
  side.relay.restore_in_child();
  ::_exit(side.start.body(side.status));
}

// errno of a failed exec, 0 once the child runs the user's work.
int wait_for_start(const FileDescriptor& status) {
  int error = 0;
  ssize_t count = 0;
  do {
    count = ::read(status.get(), &error, sizeof(error));
  } while (count < 0 && errno == EINTR);
  return count == sizeof(error) ? error : 0;
}

}  // namespace

CannotExecute::CannotExecute(int error_number)
    : std::runtime_error(std::strerror(error_number)), error(error_number) {}

RankProcess RankProcess::start(const RankStart& start, SignalRelay& relay) {
  Pipe status = make_pipe("a rank's start");
  Pipe output;
  Pipe error;
  if (start.streams == RankStart::Streams::kPiped) {
    output = make_pipe("a rank's output");
    error = make_pipe("a rank's errors");
  }
  const ChildSide side{start,
                       relay,
                       ::getpid(),
                       status.write_end.get(),
                       output.write_end.get(),
                       error.write_end.get()};
  // Between fork and restore_in_child a signal would run our handler in the child and be taken for
  // one of ours.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = ::fork();
  if (pid == 0) {
    status.read_end.reset();
    output.read_end.reset();
    error.read_end.reset();
    run_child(side);
  }
  const int fork_error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) {
    throw std::system_error(fork_error, std::generic_category(),
                            "zeropage launcher: no process for another rank (start fewer ranks or "
                            "raise the limit of processes: ulimit -u)");
  }
  RankProcess process(pid);
  process.standard_output = std::move(output.read_end);
  process.standard_error = std::move(error.read_end);
  status.write_end.reset();
  if (const int exec_error = wait_for_start(status.read_end)) throw CannotExecute(exec_error);
  return process;
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : standard_output(std::move(other.standard_output)),
      standard_error(std::move(other.standard_error)),
      pid_(std::exchange(other.pid_, -1)),
      end_(other.end_) {}

RankProcess& RankProcess::operator=(RankProcess&& other) noexcept {
  if (this == &other) return *this;
  reap();
  standard_output = std::move(other.standard_output);
  standard_error = std::move(other.standard_error);
  pid_ = std::exchange(other.pid_, -1);
  end_ = other.end_;
  return *this;
}

RankProcess::~RankProcess() {
  reap();
}

bool RankProcess::notice_end() {
  if (end_ || pid_ < 0) return false;
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    throw std::system_error(errno, std::generic_category(),
                            "zeropage launcher: the end of rank process " + std::to_string(pid_) +
                                " is unknown (something else in this program waits for children)");
  }
  if (info.si_pid == 0) return false;
  end_.emplace();
  if (info.si_code == CLD_EXITED) {
    end_->exit_code = info.si_status;
  } else {
    end_->signal = info.si_status;
    end_->core_dumped = info.si_code == CLD_DUMPED;
  }
  return true;
}

void RankProcess::signal_group(int signal) const noexcept {
  if (pid_ > 0) ::kill(-pid_, signal);
}

void RankProcess::reap() noexcept {
  if (pid_ < 0) return;
  signal_group(SIGKILL);
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED) != 0 && errno == EINTR) {
  }
  pid_ = -1;
}

}  // namespace zeropage::comm::detail
