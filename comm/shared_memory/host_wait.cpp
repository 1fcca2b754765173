#include "comm/shared_memory/host_wait.h"

#include <algorithm>
#include <string>

#include "comm/detail/peer_error.h"
#include "comm/watch/failure_reason.h"

namespace zeropage::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Condition = HostSegment::Condition;

// About two microseconds awake; with more ranks than cores a longer look would keep the awaited rank
// from its core.
constexpr int kLooksAwake = 64;
constexpr auto kLookAround = std::chrono::milliseconds(100);

// A rank waits this long before it asks itself whether the others wait for it in something else.
std::chrono::milliseconds patience_for(std::chrono::milliseconds deadline) {
  return std::min<std::chrono::milliseconds>(std::chrono::seconds(1), deadline / 4);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void HostWait::until(const FutexWord& word, c10::function_ref<bool()> ready,
                     c10::function_ref<std::vector<int>()> awaited, Moment give_up_at) {
  for (int look = 0; look < kLooksAwake; ++look) {
    if (ready()) return;
    pause_briefly();
  }
  FutexWord& sleepers = segment_.header().sleepers;
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (ready()) return;
    const auto left = std::clamp<std::chrono::nanoseconds>(
        give_up_at - Clock::now(), std::chrono::milliseconds(1), kLookAround);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(word, seen, left);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (ready()) return;
    if (aborted_) throw PeerError::of_abort(peers_.rank_of(peers_.own()));
    look_around(awaited(), give_up_at);
  }
}

void HostWait::abort() {
  aborted_ = true;
  futex_wake_all(segment_.header().meetings);
}

// Throws if one of the ranks ended or failed, or if an awaited one left or is too late.
void HostWait::look_around(const std::vector<int>& awaited, Moment give_up_at) const {
  for (int place = 0; place < peers_.size(); ++place) {
    const int rank = peers_.rank_of(place);
    const int name = peers_.name_of(place);
    const auto condition = segment_.board(place).condition.load();
    if (condition == Condition::kFailed && place != peers_.own()) {
      throw PeerError::explain(
          rank, FailureReason::parse(segment_.board(place).account.str()).as_cause_of(name));
    }
    const PeerProcess& peer = peers_.process(place);
    if (peer.has_ended() && condition == Condition::kPresent) {
      throw PeerError::explain(rank,
                               c10::str("lost rank ", name, " (process ", peer.pid(),
                                        "); it has ended or was killed. Rank ", name, " ",
                                        segment_.describe_standing(place), "; see its last lines"));
    }
  }
  for (const int place : awaited) {
    const auto condition = segment_.board(place).condition.load();
    if (condition != Condition::kLeft && condition != Condition::kGone) continue;
    const bool left = condition == Condition::kLeft;
    const std::string words =
        c10::str("lost rank ", peers_.name_of(place),
                 left ? ": it let its world go. Rank " : ": an exception ended it. Rank ",
                 peers_.name_of(place), " ", segment_.describe_standing(place),
                 left ? "; all ranks must call the same operations" : "; see its last lines");
    const int rank = peers_.rank_of(place);
    throw left ? PeerError::of_leave(rank, words) : PeerError::explain(rank, words);
  }
  if (awaited.empty()) return;
  const auto now = Clock::now();
  if (now > give_up_at - deadline_ + patience_for(deadline_)) {
    look_for_ranks_out_of_step();
  }
  if (now < give_up_at || !ends_at_deadline_) return;
  std::string standings;
  for (const int place : awaited) {
    standings += c10::str(". Rank ", peers_.name_of(place), " ", segment_.describe_standing(place),
                          peers_.state_of(peers_.rank_of(place)));
  }
  throw PeerError::explain(
      peers_.rank_of(awaited.front()),
      c10::str("rank ", peers_.name_of(awaited.front()), " did not answer within ",
               static_cast<double>(deadline_.count()) / 1000.0, " s", standings),
      /*timed_out=*/true);
}

// Ranks in different collectives meet and see for themselves; a pair of ranks does not.
void HostWait::look_for_ranks_out_of_step() const {
  auto ours = segment_.standing_of(peers_.own());
  for (int place = 0; place < peers_.size() && ours; ++place) {
    auto theirs = segment_.standing_of(place);
    if (place == peers_.own() || !theirs) continue;
    if (ours->call.operation != Operation::kPair && theirs->call.operation != Operation::kPair) {
      continue;
    }
    // Who has taken a message to its end may not have come out of its call yet.
    const int own_rank = peers_.rank_of(peers_.own());
    const int other_rank = peers_.rank_of(place);
    ours->sent[other_rank] = segment_.lane(peers_.own(), place).sent.load();
    theirs->sent[own_rank] = segment_.lane(place, peers_.own()).sent.load();
    if (!never_meet(own_rank, *ours, other_rank, *theirs, /*broadcasts_wait=*/true)) {
      continue;
    }
    throw PeerError::explain(peers_.rank_of(place), c10::str("rank ", peers_.name_of(place),
                                                             " is out of step: it waits in ",
                                                             theirs->call.describe(), kSameOrder));
  }
}

}  // namespace zeropage::comm::detail
