#include "comm/detail/judge.h"

#include <algorithm>
#include <iostream>

#include "comm/detail/account.h"

namespace zeropage::comm::detail {
namespace {

// "rank 2", "ranks 2, 3"
std::string list_of(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

}  // namespace

std::optional<Verdict> Judge::certain(const Wait& wait, const Standing& ours) const {
  std::optional<Verdict> verdict;
  if (wait.where == ours.where && wait.by_caller) verdict = out_of_step(ours);
  if (!verdict && wait.is_for_call()) verdict = failed();
  return verdict;
}

bool Judge::is_needed(const Wait& wait, int other) const {
  return other != roll_.rank() &&
         (wait.awaited.empty() ||
          std::find(wait.awaited.begin(), wait.awaited.end(), other) != wait.awaited.end());
}

std::optional<Verdict> Judge::out_of_step(const Standing& ours) const {
  for (int other = 0; other < roll_.size(); ++other) {
    if (!roll_.beats(other)) continue;
    const Standing& theirs = *roll_.standing(other);
    if (!never_meet(roll_.rank(), ours, other, theirs, facts_.broadcasts_wait)) continue;
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

std::optional<Verdict> Judge::failed() const {
  for (int other = 0; other < roll_.size(); ++other) {
    if (!roll_.has_failed(other)) continue;
    return Verdict{Verdict::Kind::kFailed, other,
                   Account::parse(roll_.standing(other)->account).as_cause_of(name(other))};
  }
  return std::nullopt;
}

std::optional<Verdict> Judge::late(Wait& wait) const {
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
std::optional<Verdict> Judge::unreachable(const Wait& wait, Wait::Clock::time_point now) const {
  const auto silence = [&](Wait::Clock::time_point heard) {
    return now - std::max(heard, wait.began);
  };
  std::vector<int> silent;
  std::string store;
  if (silence(roll_.store_answered_at()) >= wait.deadline) {
    silent = ranks_with_store();
    if (!silent.empty()) store = ", nor did the store";
  } else {
    bool is_time = false;
    for (int other = 0; other < roll_.size(); ++other) {
      if (!is_needed(wait, other)) continue;
      const auto of_other = silence(roll_.heard_at(other));
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
                 c10::str(list_of(roll_.names().of(silent)), " did not answer within ",
                          in_seconds(wait.deadline), " s", store,
                          "; stopped, or cut off from this rank's network", states, ". ",
                          roll_.describe_others())};
}

// Those that nobody hears of once the store is silent: its server, and who shares a host with it that is
// not ours.
std::vector<int> Judge::ranks_with_store() const {
  const int server = store_server_;
  if (server < 0 || server == roll_.rank()) return {};
  std::vector<int> ranks;
  for (int other = 0; other < roll_.size(); ++other) {
    bool is_beside = false;
    if (!facts_.hosts.empty()) {
      const std::string& host = facts_.hosts[static_cast<size_t>(server)];
      is_beside = facts_.hosts[static_cast<size_t>(other)] == host &&
                  facts_.hosts[static_cast<size_t>(roll_.rank())] != host;
    }
    if (other == server || is_beside) ranks.push_back(other);
  }
  return ranks;
}

std::optional<Verdict> Judge::slow(const Wait& wait) const {
  int other = -1;
  for (int rank = 0; rank < roll_.size() && other < 0; ++rank) {
    if (is_needed(wait, rank) && !is_there_too(wait, rank)) other = rank;
  }
  if (other < 0 && !wait.awaited.empty()) other = wait.awaited.front();
  if (other < 0) other = roll_.rank() == 0 ? 1 : 0;
  return Verdict{
      Verdict::Kind::kLate, other,
      c10::str("rank ", name(other), " did not answer within ", in_seconds(wait.deadline),
               " s; see its output, or raise the deadline. ", roll_.describe_others())};
}

// It waits in the same.
bool Judge::is_there_too(const Wait& wait, int other) const {
  const auto& theirs = roll_.standing(other);
  if (!theirs) return false;
  if (wait.is_for_call()) {
    return theirs->is_in_operation() && theirs->call.tag(0) == wait.call.tag(0);
  }
  return wait.where == Standing::Where::kElsewhere &&
         theirs->where == Standing::Where::kElsewhere && theirs->words == wait.words;
}

// A rank that this wait leads to, by whatever way, while it does work of its own.
std::optional<int> Judge::busy_rank(const Wait& wait) const {
  for (int other = 0; other < roll_.size(); ++other) {
    if (other == roll_.rank() || !roll_.beats(other)) continue;
    // Another thread's texts come from a thread whose work no standing tells of.
    if (wait.by_caller ? roll_.standing(other)->is_outside() : is_needed(wait, other)) return other;
  }
  return std::nullopt;
}

void Judge::report(Wait& wait, int busy, Wait::Clock::time_point now) const {
  if (now < wait.reported_at + limits_.report_interval) return;
  wait.reported_at = now;
  // The first of the ranks that wait reports it.
  for (int other = 0; other < roll_.rank(); ++other) {
    if (roll_.beats(other) && !roll_.standing(other)->is_outside()) return;
  }
  std::cerr << c10::str("zeropage: [rank ", name(roll_.rank()), "/", roll_.size(), "] has waited ",
                        tenths_of_seconds(now - wait.began), " for rank ", name(busy), ", in ",
                        wait.describe(), ": ", describe_busy(busy, now),
                        ". It is waited for up to ", in_seconds(limits_.busy_limit),
                        " s (WorldOptions::busy_limit)\n")
            << std::flush;
}

std::string Judge::describe_busy(int busy, Wait::Clock::time_point now) const {
  const auto since =
      std::chrono::milliseconds(roll_.standing(busy)->since_ms) + (now - roll_.heard_at(busy));
  return c10::str("it lives, and has been busy outside all calls for ", tenths_of_seconds(since),
                  ". ", roll_.describe(busy));
}

}  // namespace zeropage::comm::detail
