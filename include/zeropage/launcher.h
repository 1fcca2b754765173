// Starting ranks as processes, and finding what a launcher said. Free of LibTorch.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

// What a launch of local ranks may be asked for (zeropage/launcher.h).
// Units: milliseconds, lines.

namespace zeropage::comm {

struct LaunchOptions {
  enum class Output {
    // Every line of every rank comes out as "[rank 1] line". A piece that ends in '\r' counts as a
    // line.
    kPrefixAll,
    // Rank 0 keeps our stdout and stderr untouched, so that it can draw on a terminal. Its last
    // lines are then unknown to the report.
    kRankZeroBare,
  };

  // Processes to start, 1 to 4096. Each costs two file descriptors here.
  int ranks = 1;

  Output output = Output::kPrefixAll;

  // How long the others may take to end by themselves after a rank failed, or after a signal was
  // passed on to them. Ranks usually notice a dead peer and name it, which is worth waiting for.
  std::chrono::milliseconds grace{5000};

  // Lines of each rank (stdout and stderr together) that are kept for the report.
  std::size_t tail_lines = 20;

  // How many times ranks are started again, 0 to 1000. When one fails, its process is started anew, and programs whose loop is in
  // survive() (zeropage/survive.h) keep the others' processes; of other programs all ranks end and are started again. What
  // stays in a failed start for longer than `grace` is killed. Default: a rank that fails ends the launch.
  int restarts = 0;

  // The folder in which survive() copies the training state: in the host's memory. A folder inside of it is made for the launch, and goes
  // with it.
  std::string copies_in = "/dev/shm";
};

// Starts the local ranks of a job and looks after them: what torchrun does on one machine, with
// nothing else installed. Free of torch, so that `zp` starts in milliseconds.
//
// Lifetime: a call returns only when every rank has ended and been reaped. A rank never outlives
// the launcher: it ends by SIGKILL when the launcher dies, however that happens. What a rank left
// running in its own session's process group is killed when the call returns (not when the launcher
// itself gets SIGKILL).
// Threads: one launch at a time in a process; signals are handled for the whole process during the
// call and put back afterwards. launch_function forks without exec, so it must come before the
// process has any other thread.
// Units: milliseconds, lines.
// Throws: std::invalid_argument for options that make no sense, std::runtime_error
// (std::system_error among them) when the system refuses a process or a pipe. Ranks already started
// have then been killed.
//
// A rank sees RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1), MASTER_PORT
// (free a moment ago) and ZEROPAGE_LAUNCHER (our pid); everything else is inherited. Each rank
// leads a session of its own, so Ctrl-C reaches it through us. Rank 0 inherits stdin unless that is
// a terminal; the others read /dev/null.
// Runs `argv` (argv[0] is looked up in PATH) in `options.ranks` processes. Returns what main()
// should return:
//
//   - 0: every rank returned 0.
//   - 1..255: the exit code of the rank that failed first, 128 + n when signal n killed it. Where that rank says that it
//     lost another one which failed as well ("[rank 0/2] ... lost rank 1"), it is the other one's. The
//     other ranks got `grace`, then SIGTERM, a second later SIGKILL; a report with that
//     rank's last lines is the last thing on stderr. What a rank says of another that it lost is held back for up to a second,
//     until that one has had its say.
//   - 128 + n: signal n (SIGINT, SIGTERM, SIGHUP, SIGQUIT) reached the launcher and was passed on
//     to the ranks; those that still ran after `grace` were killed. Losing the reader of our own
//     output counts as SIGPIPE, passed on as SIGTERM.
//   - 127, 126: the program does not exist, cannot be executed.
int launch_program(const std::vector<std::string>& argv, const LaunchOptions& options);

// The same for a function: each rank is a fork of this process that sets the variables, calls
// `function`, flushes the standard streams and ends without running destructors of statics. What
// `function` returns is the exit code (1 if its low eight bits would hide a failure). An exception
// that leaves it is printed and the exit code is 1; the stack that LibTorch appends to its messages
// is printed only with TORCH_SHOW_CPP_STACKTRACES=1, as for what launch_program starts.
//
// Throws std::runtime_error when the process already has a second thread, or has started an
// accelerator's driver (device/accelerator_driver.h): call it first thing in main().
int launch_function(const std::function<int()>& function, const LaunchOptions& options);

}  // namespace zeropage::comm
