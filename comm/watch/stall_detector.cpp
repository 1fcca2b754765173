#include "comm/watch/stall_detector.h"

#include <algorithm>
#include <iostream>

#include "comm/watch/failure_reason.h"

namespace zeropage::comm::detail {
namespace {

// "rank 2", "ranks 2, 3"
std::string list_of(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

}  // namespace

std::optional<Verdict> StallDetector::certain(const Wait& wait, const RankStatus& ours) const {
  std::optional<Verdict> verdict;
  if (wait.where == ours.where && wait.by_caller) verdict = out_of_step(ours);
  if (!verdict && wait.is_for_call()) verdict = failed();
  return verdict;
}

bool StallDetector::is_needed(const Wait& wait, int other) const {
  return other != peers_.rank() &&
         (wait.awaited.empty() ||
          std::find(wait.awaited.begin(), wait.awaited.end(), other) != wait.awaited.end());
}

std::optional<Verdict> StallDetector::out_of_step(const RankStatus& ours) const {
  for (int other = 0; other < peers_.size(); ++other) {
    if (!peers_.has_heartbeat(other)) continue;
    const RankStatus& theirs = *peers_.status(other);
    if (!never_meet(peers_.rank(), ours, other, theirs, facts_.broadcasts_wait)) continue;
    std::string where = "for " + theirs.words;
    if (theirs.is_in_operation()) {
      const bool alike =
          ours.where == theirs.where && theirs.call.describe() == ours.call.describe();
      where =
          c10::str("in ", theirs.call.describe(),
                   alike ? c10::str(" of ", theirs.call.bytes, " bytes against ", ours.call.bytes)
                         : std::string());
    }
    return Verdict{Verdict::Kind::kOutOfStep, other,
                   c10::str("rank ", name(other), " is out of step: it waits ", where, kSameOrder)};
  }
  return std::nullopt;
}

std::optional<Verdict> StallDetector::failed() const {
  for (int other = 0; other < peers_.size(); ++other) {
    if (!peers_.has_failed(other)) continue;
    return Verdict{Verdict::Kind::kFailed, other,
                   FailureReason::parse(peers_.status(other)->account).as_cause_of(name(other))};
  }
  return std::nullopt;
}

std::optional<Verdict> StallDetector::late(Wait& wait) const {
  const auto now = Wait::Clock::now();
  if (auto verdict = unreachable(wait, now)) return verdict;
  const auto busy = busy_rank(wait);
  if (!busy) {
    return now - wait.counted_from < wait.deadline ? std::nullopt : slow(wait);
  }
  wait.counted_from = now;
  if (now - wait.began >= limits_.busy_limit) {
    return Verdict{Verdict::Kind::kLate, *busy,
                   c10::str("rank ", name(*busy), " was waited for in vain, for ",
                            in_seconds(limits_.busy_limit), " s: ", describe_busy(*busy, now),
                            "; see what it does, or raise WorldOptions::busy_limit")};
  }
  report(wait, *busy, now);
  return std::nullopt;
}

// Ranks that are cut off together go silent at slightly different times: a rank that has been silent for
// half as long is named too.
std::optional<Verdict> StallDetector::unreachable(const Wait& wait,
                                                  Wait::Clock::time_point now) const {
  const auto silence = [&](Wait::Clock::time_point heard) {
    return now - std::max(heard, wait.began);
  };
  std::vector<int> silent;
  std::string store;
  if (silence(peers_.store_answered_at()) >= wait.deadline) {
    silent = ranks_with_store();
    if (!silent.empty()) store = ", nor did the store";
  } else {
    bool is_time = false;
    for (int other = 0; other < peers_.size(); ++other) {
      if (!is_needed(wait, other)) continue;
      const auto of_other = silence(peers_.last_heartbeat_at(other));
      is_time = is_time || of_other >= wait.deadline;
      if (of_other >= wait.deadline / 2) silent.push_back(other);
    }
    if (!is_time) silent.clear();
  }
  if (silent.empty()) return std::nullopt;
  std::string states;
  for (const int other : silent) {
    if (facts_.state_of) states += facts_.state_of(other);
  }
  return Verdict{Verdict::Kind::kLate, silent.front(),
                 c10::str(list_of(peers_.names().of(silent)), " did not answer within ",
                          in_seconds(wait.deadline), " s", store,
                          "; stopped, or cut off from this rank's network", states, ". ",
                          peers_.describe_others())};
}

// Those that nobody hears of once the store is silent: its server, and who shares a host with it that is
// not ours.
std::vector<int> StallDetector::ranks_with_store() const {
  const int server = store_server_;
  if (server < 0 || server == peers_.rank()) return {};
  std::vector<int> ranks;
  for (int other = 0; other < peers_.size(); ++other) {
    bool is_beside = false;
    if (!facts_.hosts.empty()) {
      const std::string& host = facts_.hosts[static_cast<size_t>(server)];
      is_beside = facts_.hosts[static_cast<size_t>(other)] == host &&
                  facts_.hosts[static_cast<size_t>(peers_.rank())] != host;
    }
    if (other == server || is_beside) ranks.push_back(other);
  }
  return ranks;
}

std::optional<Verdict> StallDetector::slow(const Wait& wait) const {
  int other = -1;
  for (int rank = 0; rank < peers_.size() && other < 0; ++rank) {
    if (is_needed(wait, rank) && !is_there_too(wait, rank)) other = rank;
  }
  if (other < 0 && !wait.awaited.empty()) other = wait.awaited.front();
  if (other < 0) other = peers_.rank() == 0 ? 1 : 0;
  return Verdict{
      Verdict::Kind::kLate, other,
      c10::str("rank ", name(other), " did not answer within ", in_seconds(wait.deadline),
               " s; see its output, or raise the deadline. ", peers_.describe_others())};
}

// It waits in the same.
bool StallDetector::is_there_too(const Wait& wait, int other) const {
  const auto& theirs = peers_.status(other);
  if (!theirs) return false;
  if (wait.is_for_call()) {
    return theirs->is_in_operation() && theirs->call.tag(0) == wait.call.tag(0);
  }
  return wait.where == RankStatus::Where::kElsewhere &&
         theirs->where == RankStatus::Where::kElsewhere && theirs->words == wait.words;
}

// A rank that this wait leads to, by whatever way, while it does work of its own.
std::optional<int> StallDetector::busy_rank(const Wait& wait) const {
  for (int other = 0; other < peers_.size(); ++other) {
    if (other == peers_.rank() || !peers_.has_heartbeat(other)) continue;
    // Another thread's texts come from a thread whose work no standing tells of.
    if (wait.by_caller ? peers_.status(other)->is_outside() : is_needed(wait, other)) return other;
  }
  return std::nullopt;
}

void StallDetector::report(Wait& wait, int busy, Wait::Clock::time_point now) const {
  if (now < wait.reported_at + limits_.report_interval) return;
  wait.reported_at = now;
  // The first of the ranks that wait reports it.
  for (int other = 0; other < peers_.rank(); ++other) {
    if (peers_.has_heartbeat(other) && !peers_.status(other)->is_outside()) return;
  }
  std::cerr << c10::str("zeropage: [rank ", name(peers_.rank()), "/", peers_.size(),
                        "] has waited ", tenths_of_seconds(now - wait.began), " for rank ",
                        name(busy), ", in ", wait.describe(), ": ", describe_busy(busy, now),
                        ". It is waited for up to ", in_seconds(limits_.busy_limit),
                        " s (WorldOptions::busy_limit)\n")
            << std::flush;
}

std::string StallDetector::describe_busy(int busy, Wait::Clock::time_point now) const {
  const auto since = std::chrono::milliseconds(peers_.status(busy)->since_ms) +
                     (now - peers_.last_heartbeat_at(busy));
  return c10::str("it lives, and has been busy outside all calls for ", tenths_of_seconds(since),
                  ". ", peers_.describe(busy));
}

}  // namespace zeropage::comm::detail
