#include "comm/gloo/watched_link.h"

#include <thread>
#include <utility>

#include "comm/detail/store_calls.h"

namespace zeropage::comm::detail {
namespace {

// A timed-out rank waits this long for the others' account of where they stand.
constexpr auto kPostMortem = std::chrono::seconds(1);
// From the first connection that a killed process loses to its last.
constexpr auto kLastClose = std::chrono::milliseconds(20);
// The rank that serves the store waits this long for the others to end as well.
constexpr auto kFarewell = std::chrono::milliseconds(500);

std::string failure_key(int rank) {
  return c10::str("failed/", rank);
}

// There once a rank asks nothing more of the store.
std::string last_key(int rank) {
  return c10::str("parted/", rank);
}

}  // namespace

WatchedLink::WatchedLink(Options options)
    : options_(std::move(options)),
      store_(options_.store->clone()),
      link_(
          {options_.store, options_.rank, options_.size, options_.bind_address, options_.deadline}),
      watch_({.store = store_,
              .rank = options_.rank,
              .size = options_.size,
              .patience = Watch::patience_for(options_.deadline),
              .interrupt = [this] { abort(); },
              .lost_ranks = [this] { return link_.lost_peers(); }}) {}

void WatchedLink::abort() {
  link_.abort();
  options_.abort_others();
}

// Tells the others through the store, asks the store what they say, and throws the whole account.
void WatchedLink::fail(const Call& call, const PeerError& error) {
  if (const auto verdict = watch_.verdict()) {
    const std::string ours = c10::str(call.describe(), ": ", verdict->words);
    account_of(verdict->other, ours, std::chrono::seconds(0));
    part(ours, /*silent=*/options_.rank);
  }
  if (const auto lost = watch_.lost_rank(); lost && error.aborted) {
    fail_without(*lost, call, "its connection broke in the middle of a message");
  }
  if (error.aborted) {
    end(c10::str(
        call.describe(),
        ": the communicator was destroyed while this was in flight; wait for its Pending first"));
  }
  if (error.timed_out) fail_late(call, error);
  if (error.explained) part(c10::str(call.describe(), ": ", error.what()), error.peer);
  fail_without(error.peer, call, error.what());
}

void WatchedLink::fail_late(const Call& call, const PeerError& error) {
  std::string ours = c10::str(call.describe(), ": ");
  if (error.explained) {
    ours += error.what();
  } else {
    ours += c10::str("rank ", error.peer, " did not answer within ",
                     static_cast<double>(options_.deadline.count()) / 1000.0, " s");
  }
  const auto theirs = account_of(error.peer, ours, kPostMortem);
  if (theirs && !theirs->empty()) {
    part(c10::str(ours, ". Rank ", error.peer, " had failed in ", *theirs), error.peer);
  }
  part(c10::str(ours, "; it hangs, was stopped, or is busy elsewhere. ", watch_.describe_others()),
       error.peer);
}

void WatchedLink::fail_without(int peer, const Call& call, const std::string& reason) {
  const auto lost = [&call](int rank, const std::string& words) {
    return c10::str(call.describe(), ": lost rank ", rank, " (", words,
                    "); it has ended or was killed");
  };
  const int store_server = options_.store_server;
  const std::string ours = lost(peer, reason);
  const std::string see = c10::str(". See the last lines of rank ", peer);
  // The kernel closes what a dead process had one after the other.
  if (peer == store_server) std::this_thread::sleep_for(kLastClose);
  const bool served = store_server == options_.rank || is_served(store_);
  if (!served && peer == store_server) end(ours + see);
  if (!served && store_server >= 0) {
    // It would have waited for our account, had it ended because of the other.
    end(c10::str(lost(store_server, "it served the store, which has ended"), ". Rank ", peer,
                 " has ended too"));
  }
  const auto theirs = account_of(peer, ours, std::chrono::seconds(0));
  if (theirs && !theirs->empty()) {
    part(c10::str(ours, ". Rank ", peer, " had failed in ", *theirs), peer);
  }
  part(ours + see, peer);
}

// Publishes our account and returns the peer's if it has one within `patience`.
std::optional<std::string> WatchedLink::account_of(int peer, const std::string& ours,
                                                   std::chrono::seconds patience) const {
  return ask_within(patience + kPostMortem, [store = store_, own_key = failure_key(options_.rank),
                                             peer_key = failure_key(peer), ours, patience] {
    if (!is_served(store)) return std::string();
    write_key(*store, own_key, ours);
    return read_key(store, peer_key, patience).value_or("");
  });
}

// The rank that serves the store lets the others say and read why they end before it ends itself.
// A rank that is lost or hangs will not.
void WatchedLink::part(const std::string& words, int silent) {
  options_.on_failure(words);
  // The whole account, with what the peer said, before those who wait for us hear that we go.
  ask_within(kPostMortem, [store = store_, own_key = failure_key(options_.rank),
                           last_key = last_key(options_.rank), words] {
    if (!is_served(store)) return std::string();
    write_key(*store, own_key, words);
    write_key(*store, last_key, "");
    return std::string();
  });
  link_.close();
  const auto leave_at = std::chrono::steady_clock::now() + kFarewell;
  for (int other = 0; options_.rank == options_.store_server && other < options_.size; ++other) {
    if (other == silent || other == options_.rank) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        leave_at - std::chrono::steady_clock::now());
    if (left.count() > 0) read_key(store_, last_key(other), left);
  }
  ZP_THROW(words);
}

void WatchedLink::end(const std::string& words) const {
  options_.on_failure(words);
  ZP_THROW(words);
}

}  // namespace zeropage::comm::detail
