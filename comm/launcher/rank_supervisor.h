// Watches over the ranks of one launch until the last has ended: forwards their output, passes
// signals on, starts a rank that failed again or ends the others, and reports the first that failed.
//
// Lifetime: owns the ranks; the relay must outlive it.
// Threads: the launcher's only.
// Units: milliseconds.
// Throws: run(), std::system_error when the system cannot be asked (the ranks are then killed by
// their destructors).
//
// Phases go down only:
//   kRunning      all is well
//   kGrace        a rank failed; the others may end by themselves
//   kTerminating  the others got a signal they may act upon
//   kKilling      the others got SIGKILL
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/launcher/line_forwarder.h"
#include "comm/launcher/rank_process.h"
#include "comm/launcher/rank_restarts.h"
#include "comm/launcher/signal_relay.h"
#include "zeropage/launcher.h"

namespace zeropage::comm::detail {

class RankSupervisor {
 public:
  // What the process of a rank runs; made again where the rank is started again.
  using MakeBody = std::function<std::function<int(int status)>(const RankEnvironment&)>;

  // environment: what all ranks of the first start have in common.
  RankSupervisor(const LaunchOptions& options, SignalRelay& relay, RankEnvironment environment,
                 MakeBody make_body);

  void start_ranks();

  // Returns the exit code of the launch when every rank has ended and been reaped.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kRunning, kGrace, kTerminating, kKilling };

  struct Rank {
    RankProcess process;
    RankOutput output;
    std::vector<LineForwarder> streams;  // stdout, stderr; none when inherited
    bool ended_by_itself = false;        // before ranks were told to end
  };

  Rank start_rank(int number);
  bool starts_again(int rank);
  void look_after_restarts();
  void wait_and_forward();
  void handle_signals();
  void notice_ends(const std::vector<SignalEvent>& order);
  void on_end(int rank);
  void on_signal(int signal);
  void suspend();
  void escalate();
  void enter(Phase phase, std::chrono::milliseconds time);
  void signal_all(int signal) const;
  void release_held();
  void drain(Rank& rank);
  void end_leftovers_and_drain();
  void find_cause();

  int poll_timeout() const;
  std::vector<int> running_ranks() const;
  int exit_code() const;

  const LaunchOptions options_;
  SignalRelay& relay_;
  const RankEnvironment environment_;
  const MakeBody make_body_;
  std::optional<RankRestarts> restarts_;  // none: no rank is started again

  std::deque<Rank> ranks_;
  Phase phase_ = Phase::kRunning;
  std::optional<Clock::time_point> deadline_;  // when to leave the phase
  std::optional<int> culprit_;                 // the rank that failed first; at the end, the cause
  Clock::time_point first_failure_;
  std::optional<int> interrupted_by_;  // the signal that ended the launch, before any rank failed
};

}  // namespace zeropage::comm::detail
