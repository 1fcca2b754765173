#include "comm/detail/roll.h"

#include <algorithm>
#include <iostream>
#include <utility>

#include "comm/detail/account.h"

namespace zeropage::comm::detail {
namespace {

using std::chrono::milliseconds;

// An error names this many ranks.
constexpr int kMostRanks = 8;

std::string tenths_of_seconds(std::chrono::steady_clock::duration time) {
  const auto whole = std::chrono::duration_cast<milliseconds>(time);
  return c10::str(static_cast<double>(whole.count() / 100) / 10.0, " s");
}

// "rank 2", "ranks 2, 3"
std::string names(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

}  // namespace

void Roll::learn(Facts facts) {
  facts_ = std::move(facts);
  store_answered_at_ = Clock::now();
}

Roll::Wait Roll::begin_wait(std::string what, milliseconds deadline) const {
  const auto now = Clock::now();
  return {.what = std::move(what),
          .deadline = deadline,
          .began = now,
          .counted_from = now,
          .next_report = now + options_.limits.report_interval};
}

void Roll::note_shared(const Call& call) {
  last_shared_ = call;
  last_shared_at_ = Clock::now();
}

void Roll::listen(int other, const std::string& text) {
  auto standing = Standing::parse(text);
  if (!standing) return;
  Heard& heard = heard_[static_cast<size_t>(other)];
  if (heard.standing && heard.standing->beat != standing->beat) heard.at = Clock::now();
  if (heard.period != period_) {
    heard.period = period_;
    heard.first_beat = standing->beat;
  }
  heard.standing = std::move(standing);
}

bool Roll::beats(int other) const {
  const Heard& heard = of(other);
  return heard.standing && heard.period == period_ && heard.standing->beat != heard.first_beat &&
         heard.standing->where != Standing::Where::kLeft;
}

bool Roll::all_know() const {
  for (int other = 0; other < options_.size; ++other) {
    const auto& standing = of(other).standing;
    if (beats(other) && !standing->is_outside() && standing->account.empty()) return false;
  }
  return true;
}

bool Roll::is_needed(const Wait& wait, int other) const {
  return other != options_.rank &&
         (wait.awaited.empty() ||
          std::find(wait.awaited.begin(), wait.awaited.end(), other) != wait.awaited.end());
}

// ---- verdicts ----

std::optional<Verdict> Roll::out_of_step(const Standing& ours) const {
  for (int other = 0; other < options_.size; ++other) {
    if (!beats(other)) continue;
    const Standing& theirs = *of(other).standing;
    if (!never_meet(options_.rank, ours, other, theirs, facts_.broadcasts_wait)) continue;
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

std::optional<Verdict> Roll::failed() const {
  for (int other = 0; other < options_.size; ++other) {
    // It is over for a rank that has left an account, whether its watch still beats or not.
    const Heard& heard = of(other);
    if (!heard.standing || heard.period != period_ || heard.standing->account.empty()) continue;
    return Verdict{Verdict::Kind::kFailed, other,
                   Account::parse(of(other).standing->account).as_cause_of(name(other))};
  }
  return std::nullopt;
}

std::optional<Verdict> Roll::late(Wait& wait, const std::optional<Call>& call) const {
  const auto now = Clock::now();
  if (auto verdict = unreachable(wait, now)) return verdict;
  const auto busy = busy_rank(wait);
  if (!busy) {
    return now - wait.counted_from < wait.deadline ? std::nullopt : slow(wait, call);
  }
  wait.counted_from = now;
  if (now - wait.began >= options_.limits.busy_limit) {
    return Verdict{
        Verdict::Kind::kLate, *busy,
        c10::str("rank ", *busy, " was waited for in vain, for ",
                 in_seconds(options_.limits.busy_limit), " s: ", describe_busy(*busy, now),
                 "; see what it does, or raise WorldOptions::busy_limit")};
  }
  report(wait, call, *busy, now);
  return std::nullopt;
}

// Of ranks that are cut off together some are heard a little later than others: who has been silent for
// half as long is named too.
std::optional<Verdict> Roll::unreachable(const Wait& wait, Clock::time_point now) const {
  const auto silence = [&](Clock::time_point heard) { return now - std::max(heard, wait.began); };
  std::vector<int> silent;
  std::string store;
  if (silence(store_answered_at_) >= wait.deadline) {
    silent = ranks_with_store();
    if (!silent.empty()) store = ", nor did the store";
  } else {
    bool is_time = false;
    for (int other = 0; other < options_.size; ++other) {
      if (!is_needed(wait, other)) continue;
      const auto of_other = silence(of(other).at);
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
  return Verdict{
      Verdict::Kind::kLate, silent.front(),
      c10::str(names(silent), " did not answer within ", in_seconds(wait.deadline), " s", store,
               "; stopped, or cut off from this rank's network", states, ". ", describe_others())};
}

// Those that nobody hears of once the store is silent: its server, and who shares a host with it that is
// not ours.
std::vector<int> Roll::ranks_with_store() const {
  const int server = options_.store_server;
  if (server < 0 || server == options_.rank) return {};
  std::vector<int> ranks;
  for (int other = 0; other < options_.size; ++other) {
    bool is_beside = false;
    if (!facts_.hosts.empty()) {
      const std::string& host = facts_.hosts[static_cast<size_t>(server)];
      is_beside = facts_.hosts[static_cast<size_t>(other)] == host &&
                  facts_.hosts[static_cast<size_t>(options_.rank)] != host;
    }
    if (other == server || is_beside) ranks.push_back(other);
  }
  return ranks;
}

std::optional<Verdict> Roll::slow(const Wait& wait, const std::optional<Call>& call) const {
  int other = wait.awaited.empty() ? -1 : wait.awaited.front();
  // Of those that are awaited in another world one that is not there yet.
  for (const int awaited : wait.awaited) {
    const auto& theirs = of(awaited).standing;
    const bool is_there =
        theirs && theirs->where == Standing::Where::kElsewhere && theirs->words == wait.what;
    if (call || is_there) continue;
    other = awaited;
    break;
  }
  for (int rank = 0; rank < options_.size && other < 0; ++rank) {
    const auto& theirs = of(rank).standing;
    const bool is_with_us =
        theirs && call && theirs->is_in_operation() && theirs->call.tag(0) == call->tag(0);
    if (rank != options_.rank && !is_with_us) other = rank;
  }
  if (other < 0) other = options_.rank == 0 ? 1 : 0;
  return Verdict{Verdict::Kind::kLate, other,
                 c10::str("rank ", other, " did not answer within ", in_seconds(wait.deadline),
                          " s; see its output, or raise the deadline. ", describe_others())};
}

// A rank that this wait leads to, by whatever way, while it does work of its own.
std::optional<int> Roll::busy_rank(const Wait& wait) const {
  for (int other = 0; other < options_.size; ++other) {
    if (other == options_.rank || !beats(other)) continue;
    // Another thread's texts come from a thread whose work no standing tells of.
    if (wait.by_caller ? of(other).standing->is_outside() : is_needed(wait, other)) return other;
  }
  return std::nullopt;
}

void Roll::report(Wait& wait, const std::optional<Call>& call, int busy,
                  Clock::time_point now) const {
  if (now < wait.next_report) return;
  wait.next_report = now + options_.limits.report_interval;
  // Of all that wait one says so.
  for (int other = 0; other < options_.rank; ++other) {
    if (beats(other) && !of(other).standing->is_outside()) return;
  }
  std::cerr << c10::str("zeropage: [rank ", options_.rank, "/", options_.size, "] has waited ",
                        tenths_of_seconds(now - wait.began), " for rank ", busy, ", in ",
                        call ? call->describe() : wait.what, ": ", describe_busy(busy, now),
                        ". It is waited for up to ", in_seconds(options_.limits.busy_limit),
                        " s (WorldOptions::busy_limit)\n")
            << std::flush;
}

// ---- words ----

std::string Roll::describe_busy(int busy, Clock::time_point now) const {
  const Heard& heard = of(busy);
  const auto since = milliseconds(heard.standing->since_ms) + (now - heard.at);
  return c10::str("it lives, and has been busy outside all calls for ", tenths_of_seconds(since),
                  ". ", describe(busy));
}

std::string Roll::describe(int other) const {
  const Heard& heard = of(other);
  const std::string rank = c10::str("Rank ", other);
  if (heard.standing && heard.standing->where == Standing::Where::kLeft) return rank + " has ended";
  if (!beats(other)) {
    if (!last_shared_) return rank + " has not been heard of yet";
    return c10::str(rank, " was last heard in ", last_shared_->describe(), ", ",
                    tenths_of_seconds(Clock::now() - last_shared_at_), " ago");
  }
  const Standing& theirs = *heard.standing;
  const auto gone = Clock::now() - heard.at;
  const bool silent = gone > std::max(options_.limits.deadline / 2, milliseconds(1000));
  const std::string when = silent ? ", silent for " + tenths_of_seconds(gone) : "";
  switch (theirs.where) {
    case Standing::Where::kInTexts:
      return c10::str(rank, " waits for ", theirs.words, when);
    case Standing::Where::kElsewhere:
      return c10::str(rank, silent ? " stood at " : " stands at ", theirs.words, when);
    case Standing::Where::kOutside:
      return c10::str(rank, theirs.words.empty() ? " has called nothing yet" : " was last in ",
                      theirs.words, when);
    case Standing::Where::kInCall:
    case Standing::Where::kOnDevice:
    case Standing::Where::kLeft:
      break;
  }
  return c10::str(rank, silent ? " stood at " : " stands at ", theirs.call.describe(), when);
}

std::string Roll::describe_others() const {
  std::string text;
  int named = 0;
  for (int other = 0; other < options_.size; ++other) {
    if (other == options_.rank) continue;
    if (++named > kMostRanks) return text + " ...";
    text += c10::str(text.empty() ? "" : ". ", describe(other));
  }
  return text;
}

}  // namespace zeropage::comm::detail
