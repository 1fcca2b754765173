#include "comm/gloo/watched_link.h"

#include <thread>
#include <utility>

#include "comm/watch/store_calls.h"

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

WatchedLink::Options filled_in(WatchedLink::Options options) {
  if (!options.watched_store) options.watched_store = options.store;
  if (options.watch) return options;
  options.watch = std::make_shared<Watch>(Watch::Options{.store = options.watched_store,
                                                         .rank = options.rank,
                                                         .size = options.size,
                                                         .store_server = options.store_server,
                                                         .limits = {.deadline = options.deadline},
                                                         .names = options.names});
  return options;
}

// There once a rank asks nothing more of the store.
std::string last_key(int rank) {
  return c10::str("parted/", rank);
}

}  // namespace

WatchedLink::WatchedLink(Options options)
    : options_(filled_in(std::move(options))),
      store_(options_.watched_store),
      link_({.store = options_.store,
             .rank = options_.rank,
             .size = options_.size,
             .bind_address = options_.bind_address,
             .deadline = options_.deadline,
             .longest_wait = options_.watch->limits().longest()}),
      watch_(options_.watch) {
  watch_->start({.interrupt = [this] { abort(); },
                 .lost_ranks = [this] { return link_.lost_peers(); },
                 .facts = {.hosts = options_.hosts, .state_of = options_.state_of},
                 .tell = [this](const FailureReason& account) { leave_for_others(account); }});
}

void WatchedLink::abort() {
  link_.abort();
  options_.abort_others();
}

// Tells the others through the store, asks the store what they say, and throws the whole account.
void WatchedLink::fail(const Call& call, const PeerError& error) {
  const auto verdict = watch_->activity().verdict();
  if (verdict && verdict->kind == Verdict::Kind::kLate) {
    fail_late(call, verdict->other, verdict->words);
  }
  if (verdict && verdict->kind != Verdict::Kind::kLost) {
    const FailureReason ours{verdict->words, call.describe()};
    failure_of(verdict->other, ours, std::chrono::seconds(0));
    part(ours, /*silent=*/options_.rank);
  }
  if (verdict && error.aborted) fail_without(verdict->other, call, verdict->words);
  if (error.aborted) {
    end({"the communicator was destroyed while this was in flight; wait for its Pending first",
         call.describe()});
  }
  if (error.explained) part({error.what(), call.describe()}, error.peer);
  if (error.timed_out) {
    fail_late(call, error.peer,
              c10::str("rank ", options_.names[error.peer], " did not answer within ",
                       in_seconds(watch_->limits().longest()), " s"));
  }
  fail_without(error.peer, call, error.what());
}

void WatchedLink::fail_late(const Call& call, int peer, const std::string& reason) {
  const FailureReason ours{reason, call.describe()};
  const auto theirs = failure_of(peer, ours, kPostMortem);
  if (theirs && !theirs->cause.empty()) {
    part({theirs->as_cause_of(options_.names[peer]), ours.call}, peer);
  }
  part(ours, peer);
}

void WatchedLink::fail_without(int peer, const Call& call, const std::string& reason) {
  const auto lost = [](int name, const std::string& words) {
    return c10::str("lost rank ", name, " (", words, "); it has ended or was killed");
  };
  const int store_server = options_.store_server;
  const int name = options_.names[peer];
  const FailureReason ours{c10::str(lost(name, reason), ". See the last lines of rank ", name),
                           call.describe()};
  // The kernel closes what a dead process had one after the other.
  if (peer == store_server) std::this_thread::sleep_for(kLastClose);
  const bool served = store_server == options_.rank || is_served(store_);
  if (!served && peer == store_server) end(ours);
  if (!served && options_.store_server_name >= 0) {
    // It would have waited for our account, had it ended because of the other.
    end({c10::str(lost(options_.store_server_name, "it served the store, which has ended"),
                  ". Rank ", name, " has ended too"),
         ours.call});
  }
  const auto theirs = failure_of(peer, ours, std::chrono::seconds(0));
  if (theirs && !theirs->cause.empty()) {
    part({theirs->as_cause_of(options_.names[peer]), ours.call}, peer);
  }
  part(ours, peer);
}

// Publishes our account and returns the peer's if it has one within `patience`.
std::optional<FailureReason> WatchedLink::failure_of(int peer, const FailureReason& ours,
                                                     std::chrono::seconds patience) const {
  const auto theirs =
      ask_within(patience + kPostMortem, [store = store_, own_key = failure_key(options_.rank),
                                          peer_key = failure_key(peer), ours, patience] {
        if (!is_served(store)) return std::string();
        write_key(*store, own_key, ours.to_text());
        return read_key(store, peer_key, patience).value_or("");
      });
  if (!theirs) return std::nullopt;
  return FailureReason::parse(*theirs);
}

// The rank that serves the store lets the others say and read why they end before it ends itself.
// A rank that is lost or hangs will not.
void WatchedLink::part(const FailureReason& ours, int silent) {
  options_.on_failure(ours);
  // The whole account, with what the peer said, before those who wait for us hear that we go.
  ask_within(kPostMortem, [store = store_, own_key = failure_key(options_.rank),
                           last_key = last_key(options_.rank), ours] {
    if (!is_served(store)) return std::string();
    write_key(*store, own_key, ours.to_text());
    write_key(*store, last_key, "");
    return std::string();
  });
  watch_->fail_group(ours);
  link_.close();
  const auto leave_at = std::chrono::steady_clock::now() + kFarewell;
  for (int other = 0; options_.rank == options_.store_server && other < options_.size; ++other) {
    if (other == silent || other == options_.rank) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        leave_at - std::chrono::steady_clock::now());
    if (left.count() > 0) read_key(store_, last_key(other), left);
  }
  ZP_THROW(ours.words());
}

void WatchedLink::end(const FailureReason& ours) const {
  options_.on_failure(ours);
  watch_->fail_group(ours);
  ZP_THROW(ours.words());
}

// Whoever loses its connection to this rank looks there.
void WatchedLink::leave_for_others(const FailureReason& account) const {
  options_.on_failure(account);
  ask_within(kPostMortem, [store = store_, key = failure_key(options_.rank), account] {
    if (is_served(store)) write_key(*store, key, account.to_text());
    return std::string();
  });
}

}  // namespace zeropage::comm::detail
