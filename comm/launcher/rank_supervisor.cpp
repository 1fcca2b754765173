#include "comm/launcher/rank_supervisor.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <poll.h>
#include <utility>

#include "comm/launcher/launch_report.h"

namespace zeropage::comm::detail {
namespace {

// From SIGTERM to SIGKILL after a failure: enough to flush, not to save a state.
constexpr std::chrono::milliseconds kTerminationTime{1000};

// A killed rank's connections close a moment before its end can be seen, so that a peer may end first.
constexpr std::chrono::milliseconds kLateNotice{500};

// How long the words of a rank that blames another are held back for that rank's own, which come a moment later.
constexpr std::chrono::milliseconds kHoldTime{1000};

// Whether this is the cause and the end of another rank with an exit code is the effect. Losing a
// peer may make a rank abort, but raises no other signal.
bool explains_failure_of_others(const RankEnd& end) {
  return end.signal != 0 && end.signal != SIGABRT;
}

void say(const std::string& text) {
  write_fully(STDERR_FILENO, "zeropage: " + text + "\n");
}

}  // namespace

RankSupervisor::RankSupervisor(const LaunchOptions& options, SignalRelay& relay,
                               RankEnvironment environment, MakeBody make_body)
    : options_(options),
      relay_(relay),
      environment_(std::move(environment)),
      make_body_(std::move(make_body)) {
  if (options.restarts > 0) restarts_.emplace(options, environment_.master_port, &say);
}

void RankSupervisor::start_ranks() {
  for (int number = 0; number < options_.ranks; ++number) ranks_.push_back(start_rank(number));
}

RankSupervisor::Rank RankSupervisor::start_rank(int number) {
  std::vector<int> others;
  for (const Rank& rank : ranks_) {
    for (const LineForwarder& stream : rank.streams) {
      if (stream.is_open()) others.push_back(stream.source());
    }
  }
  RankEnvironment environment = environment_;
  environment.rank = number;
  if (restarts_) restarts_->complete(environment);
  RankStart start;
  if (number == 0) {
    start.input = RankStart::Input::kInheritedUnlessTerminal;
    if (options_.output == LaunchOptions::Output::kRankZeroBare) {
      start.streams = RankStart::Streams::kInherited;
    }
  }
  start.body = make_body_(environment);
  start.close_in_child = others;
  const bool shows_stacks = std::getenv("TORCH_SHOW_CPP_STACKTRACES") != nullptr;
  Rank rank{
      RankProcess::start(start, relay_), RankOutput(number, options_.tail_lines, shows_stacks), {}};
  if (start.streams == RankStart::Streams::kPiped) {
    const std::string prefix = "[rank " + std::to_string(number) + "] ";
    rank.streams.emplace_back(std::move(rank.process.standard_output), STDOUT_FILENO, prefix);
    rank.streams.emplace_back(std::move(rank.process.standard_error), STDERR_FILENO, prefix);
  }
  return rank;
}

// Whether a rank that has ended runs again.
bool RankSupervisor::starts_again(int number) {
  Rank& rank = ranks_[number];
  if (!restarts_ || phase_ != Phase::kRunning) return false;
  if (!restarts_->takes(number, *rank.process.end())) return false;
  rank.process.signal_group(SIGKILL);
  drain(rank);
  for (LineForwarder& stream : rank.streams) {
    if (stream.is_open()) stream.finish(rank.output);
  }
  rank.output.release();
  rank.process.reap();
  rank = start_rank(number);
  return true;
}

void RankSupervisor::look_after_restarts() {
  if (!restarts_ || phase_ != Phase::kRunning) return;
  for (const int late : restarts_->look()) {
    if (ranks_[late].process.end()) continue;
    say("rank " + std::to_string(late) + " did not leave its loop within " +
        name_duration(options_.grace) + ": sending SIGKILL");
    ranks_[late].process.signal_group(SIGKILL);
  }
}

int RankSupervisor::run() {
  while (!running_ranks().empty()) {
    wait_and_forward();
    handle_signals();
    look_after_restarts();
    release_held();
    if (deadline_ && Clock::now() >= *deadline_) escalate();
  }
  end_leftovers_and_drain();
  find_cause();
  if (culprit_) ranks_[*culprit_].output.release();
  for (Rank& rank : ranks_) rank.output.release();
  if (culprit_) {
    const Rank& rank = ranks_[*culprit_];
    const auto streams =
        rank.streams.empty() ? RankStart::Streams::kInherited : RankStart::Streams::kPiped;
    write_fully(STDERR_FILENO,
                failure_report({*culprit_, rank.process.pid(), *rank.process.end(), streams},
                               rank.output, options_));
  }
  for (Rank& rank : ranks_) rank.process.reap();
  return exit_code();
}

void RankSupervisor::wait_and_forward() {
  std::vector<pollfd> watched{{relay_.fd(), POLLIN, 0}};
  std::vector<std::pair<LineForwarder*, RankOutput*>> sources;
  for (Rank& rank : ranks_) {
    for (LineForwarder& stream : rank.streams) {
      if (!stream.is_open()) continue;
      watched.push_back({stream.source(), POLLIN, 0});
      sources.emplace_back(&stream, &rank.output);
    }
  }
  if (::poll(watched.data(), watched.size(), poll_timeout()) <= 0) return;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (watched[i + 1].revents != 0) sources[i].first->forward_available(*sources[i].second);
  }
}

int RankSupervisor::poll_timeout() const {
  std::optional<Clock::time_point> next = deadline_;
  if (restarts_ && phase_ == Phase::kRunning) {
    next = std::min(next.value_or(Clock::time_point::max()), Clock::now() + RankRestarts::kLook);
  }
  for (const Rank& rank : ranks_) {
    const auto& held_since = rank.output.held_since();
    if (held_since)
      next = std::min(next.value_or(Clock::time_point::max()), *held_since + kHoldTime);
  }
  if (!next) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
  constexpr std::chrono::milliseconds::rep kLongest = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<std::chrono::milliseconds::rep>(left.count(), 0, kLongest));
}

void RankSupervisor::handle_signals() {
  const std::vector<SignalEvent> events = relay_.take();
  if (events.empty()) return;
  notice_ends(events);
  for (const SignalEvent& event : events) {
    if (event.signal == SIGTSTP) {
      suspend();
    } else if (event.signal != SIGCHLD) {
      on_signal(event.signal);
    }
  }
}

void RankSupervisor::notice_ends(const std::vector<SignalEvent>& order) {
  // First in the order the kernel told, because a rank's end makes its peers fail within
  // microseconds...
  for (const SignalEvent& event : order) {
    for (std::size_t i = 0; event.signal == SIGCHLD && i < ranks_.size(); ++i) {
      RankProcess& process = ranks_[i].process;
      if (process.pid() == event.sender && process.notice_end()) on_end(static_cast<int>(i));
    }
  }
  // ...then all, because of several SIGCHLD at once we see one.
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].process.notice_end()) on_end(static_cast<int>(i));
  }
}

void RankSupervisor::on_end(int rank) {
  if (starts_again(rank)) return;
  const RankEnd& end = *ranks_[rank].process.end();
  ranks_[rank].ended_by_itself = phase_ < Phase::kTerminating;
  if (phase_ == Phase::kRunning && end.failed()) {
    culprit_ = rank;
    first_failure_ = Clock::now();
    enter(Phase::kGrace, options_.grace);
  } else if (phase_ == Phase::kGrace && ranks_[*culprit_].process.end()->signal == 0 &&
             explains_failure_of_others(end) && Clock::now() < first_failure_ + kLateNotice) {
    culprit_ = rank;
  }
}

void RankSupervisor::on_signal(int signal) {
  const std::vector<int> running = running_ranks();
  if (running.empty()) return;
  if (phase_ == Phase::kRunning) interrupted_by_ = signal;
  if (phase_ < Phase::kTerminating) {
    // Nobody wants to hear about `zp run ... | head`.
    if (signal != SIGPIPE) {
      say("received " + signal_name(signal) + ", passed on to " + name_ranks(running));
    }
    enter(Phase::kTerminating, options_.grace);
  }
  // Ranks have nothing to do with our own output being closed.
  signal_all(signal == SIGPIPE ? SIGTERM : signal);
}

void RankSupervisor::suspend() {
  // Ctrl-Z reached only us. The ranks' groups are orphans to the terminal, for which the kernel
  // ignores SIGTSTP.
  signal_all(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  signal_all(SIGCONT);
}

void RankSupervisor::escalate() {
  const std::string running = name_ranks(running_ranks());
  if (phase_ == Phase::kGrace) {
    say(running + " still running " + name_duration(options_.grace) + " after rank " +
        std::to_string(*culprit_) + " failed: sending SIGTERM");
    enter(Phase::kTerminating, kTerminationTime);
    signal_all(SIGTERM);
    signal_all(SIGCONT);
  } else {
    say(running + " did not end in time: sending SIGKILL");
    enter(Phase::kKilling, {});
    signal_all(SIGKILL);
  }
}

void RankSupervisor::enter(Phase phase, std::chrono::milliseconds time) {
  phase_ = phase;
  if (restarts_) restarts_->close();
  deadline_.reset();
  if (phase != Phase::kKilling) deadline_ = Clock::now() + time;
}

void RankSupervisor::signal_all(int signal) const {
  for (const Rank& rank : ranks_) rank.process.signal_group(signal);
}

// What a rank says of another comes behind what that one says itself.
void RankSupervisor::release_held() {
  for (Rank& rank : ranks_) {
    if (!rank.output.held_since()) continue;
    const auto blamed = static_cast<std::size_t>(*rank.output.blamed());
    const bool is_ours = blamed < ranks_.size();
    if (is_ours && ranks_[blamed].process.end()) {
      drain(ranks_[blamed]);
      if (!ranks_[blamed].output.held_since()) rank.output.release();
    }
    if (!is_ours || Clock::now() >= *rank.output.held_since() + kHoldTime) rank.output.release();
  }
}

void RankSupervisor::drain(Rank& rank) {
  for (LineForwarder& stream : rank.streams) {
    while (stream.is_open() && stream.forward_available(rank.output)) {
    }
  }
}

void RankSupervisor::end_leftovers_and_drain() {
  // Not until end of file: a daemon that left the group may hold the pipe open for ever.
  signal_all(SIGKILL);
  for (Rank& rank : ranks_) {
    drain(rank);
    for (LineForwarder& stream : rank.streams) {
      if (stream.is_open()) stream.finish(rank.output);
    }
  }
  // A signal that came with the last end counts as well.
  for (const SignalEvent& event : relay_.take()) {
    if (event.signal == SIGCHLD || event.signal == SIGTSTP || phase_ != Phase::kRunning) continue;
    if (!interrupted_by_) interrupted_by_ = event.signal;
  }
}

// A rank may end before the one whose failure it ends of. A signal is a cause in itself.
void RankSupervisor::find_cause() {
  for (std::size_t hops = 0; culprit_ && hops < ranks_.size(); ++hops) {
    const Rank& rank = ranks_[*culprit_];
    const auto& blamed = rank.output.blamed();
    if (explains_failure_of_others(*rank.process.end()) || !blamed) return;
    const auto other = static_cast<std::size_t>(*blamed);
    if (other >= ranks_.size()) return;
    if (!ranks_[other].ended_by_itself || !ranks_[other].process.end()->failed()) return;
    culprit_ = *blamed;
  }
}

std::vector<int> RankSupervisor::running_ranks() const {
  std::vector<int> running;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].process.end()) running.push_back(static_cast<int>(i));
  }
  return running;
}

int RankSupervisor::exit_code() const {
  if (culprit_) return ranks_[*culprit_].process.end()->shell_code();
  return interrupted_by_ ? 128 + *interrupted_by_ : 0;
}

}  // namespace zeropage::comm::detail
