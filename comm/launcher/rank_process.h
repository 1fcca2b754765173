// One rank: a child process that leads its own session and process group, dies with the launcher,
// and writes to pipes.
//
// Lifetime: owns the child. The child stays a zombie until reap() or the destructor, so its pid and
// group id cannot name a stranger while we may still signal them. The destructor of one that was
// not reaped kills the group.
// Threads: the kernel ties "dies with the launcher" to the thread that called start(), which must
// live as long as the rank.
// Throws: start(), std::system_error (no process, no pipe) or CannotExecute.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <sys/types.h>

#include "comm/launcher/file_descriptor.h"
#include "comm/launcher/signal_relay.h"

namespace zeropage::comm::detail {

// The child could not become the program.
struct CannotExecute : std::runtime_error {
  explicit CannotExecute(int error);
  int error;  // errno of exec
};

struct RankEnd {
  int exit_code = 0;
  int signal = 0;  // 0: ended by itself
  bool core_dumped = false;

  bool failed() const { return exit_code != 0 || signal != 0; }
  // The status that a shell reports: the exit code, or 128 + the signal.
  int shell_code() const { return signal != 0 ? 128 + signal : exit_code; }
};

struct RankStart {
  enum class Streams { kPiped, kInherited };
  enum class Input { kInheritedUnlessTerminal, kNothing };

  Streams streams = Streams::kPiped;
  Input input = Input::kNothing;
  // Runs in the child once all else is set up; returns the exit code. It must close `status` (exec
  // does) when it starts the user's work, or write errno to it when that cannot be started.
  std::function<int(int status)> body;
  // What a child that does not exec must not hold: the pipes of ranks started before it.
  std::span<const int> close_in_child;
};

class RankProcess {
 public:
  // Returns when the child runs the user's work.
  static RankProcess start(const RankStart& start, SignalRelay& relay);

  RankProcess(RankProcess&& other) noexcept;
  // Reaps the one that this was.
  RankProcess& operator=(RankProcess&& other) noexcept;
  ~RankProcess();

  pid_t pid() const { return pid_; }
  const std::optional<RankEnd>& end() const { return end_; }

  // Looks, without waiting, whether the process has ended; true when this call found out.
  bool notice_end();

  // Sends a signal to the process and all it started in its group, also after the process itself
  // ended.
  void signal_group(int signal) const noexcept;

  // Ends what is left of the group, and the zombie. Waits for a process that still runs.
  void reap() noexcept;

  // Read ends; closed ones for Streams::kInherited. To be taken by whoever forwards them.
  FileDescriptor standard_output;
  FileDescriptor standard_error;

 private:
  explicit RankProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_;  // -1: reaped or moved from
  std::optional<RankEnd> end_;
};

}  // namespace zeropage::comm::detail
