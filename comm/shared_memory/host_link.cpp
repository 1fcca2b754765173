#include "comm/shared_memory/host_link.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unistd.h>
#include <utility>

#include "memory/check.h"

namespace zeropage::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Announcement = HostSegment::Announcement;
using Board = HostSegment::Board;
using Condition = HostSegment::Condition;
using Header = HostSegment::Header;
using Lane = HostSegment::Lane;
using PairRecord = HostSegment::PairRecord;

// About two microseconds awake; with more ranks than cores a longer look would keep the awaited rank
// from its core.
constexpr int kLooksAwake = 64;
constexpr auto kLookAround = std::chrono::milliseconds(100);
// What a rank tries to read in another's memory.
constexpr uint64_t kCookie = 0x5A65726F70616765ULL;

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

HostLink::HostLink(SharedSegment segment, const Options& options)
    : segment_(std::move(segment), static_cast<int>(options.ranks.size())),
      options_(options),
      peers_(options.ranks.size()) {
  if (own() == 0) {
    new (&header()) Header;
    for (int from = 0; from < size(); ++from) {
      for (int to = 0; to < size(); ++to) new (&lane(from, to)) Lane;
    }
  }
  new (&board(own())) Board;
  uint64_t* const sample = options.sample != nullptr ? options.sample : &cookie_;
  *sample = kCookie;
  board(own()).announcements[0].address = reinterpret_cast<uint64_t>(sample);
  siblings_may_read_.emplace();
  board(own()).pid.store(getpid(), std::memory_order_release);
}

std::string HostLink::find_peers() {
  for (int place = 0; place < size(); ++place) {
    peers_[static_cast<size_t>(place)] = PeerProcess(board(place).pid.load());
  }
  for (int place = 0; place < size(); ++place) {
    if (place == own()) continue;
    uint64_t cookie = 0;
    const PeerProcess& peer = peers_[static_cast<size_t>(place)];
    const int error = peer.read(board(place).announcements[0].address, &cookie, sizeof(cookie));
    if (error != 0 || cookie != kCookie) {
      return c10::str("rank ", name_of(own()), " cannot read the memory of rank ", name_of(place),
                      " (process ", peer.pid(),
                      "): ", error != 0 ? std::strerror(error) : "it reads other values");
    }
  }
  return "";
}

void HostLink::use_peer_memory(bool all_can) {
  reads_peers_ = all_can;
  if (!all_can) siblings_may_read_.reset();
}

HostLink::~HostLink() {
  Condition present = Condition::kPresent;
  board(own()).condition.compare_exchange_strong(present, Condition::kLeft);
  futex_wake_all(header().meetings);
}

// ---- waiting ----

template <typename Ready, typename Awaited>
void HostLink::wait(const FutexWord& word, Ready ready, Awaited awaited, Moment give_up_at) {
  for (int look = 0; look < kLooksAwake; ++look) {
    if (ready()) return;
    pause_briefly();
  }
  FutexWord& sleepers = header().sleepers;
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (ready()) return;
    const auto left = std::clamp<std::chrono::nanoseconds>(
        give_up_at - Clock::now(), std::chrono::milliseconds(1), kLookAround);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(word, seen, left);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (ready()) return;
    if (aborted_) throw PeerError::of_abort(rank_of(own()));
    look_around(awaited(), give_up_at);
  }
}

// Throws if one of the ranks ended or failed, or if an awaited one left or is too late.
void HostLink::look_around(const std::vector<int>& awaited, Moment give_up_at) const {
  for (int place = 0; place < size(); ++place) {
    const int rank = rank_of(place);
    const int name = name_of(place);
    const auto condition = board(place).condition.load();
    if (condition == Condition::kFailed && place != own()) {
      throw PeerError::explain(rank, Account::parse(board(place).account.str()).as_cause_of(name));
    }
    const PeerProcess& peer = peers_[static_cast<size_t>(place)];
    if (peer.has_ended() && condition != Condition::kLeft) {
      throw PeerError::explain(rank,
                               c10::str("lost rank ", name, " (process ", peer.pid(),
                                        "); it has ended or was killed. Rank ", name, " ",
                                        segment_.describe_standing(place), "; see its last lines"));
    }
  }
  for (const int place : awaited) {
    if (board(place).condition.load() == Condition::kLeft) {
      throw PeerError::explain(
          rank_of(place), c10::str("lost rank ", name_of(place), ": it let its world go. Rank ",
                                   name_of(place), " ", segment_.describe_standing(place),
                                   "; all ranks must call the same operations"));
    }
  }
  if (awaited.empty()) return;
  const auto now = Clock::now();
  if (now > give_up_at - options_.deadline + patience_for(options_.deadline)) {
    look_for_ranks_out_of_step();
  }
  if (now < give_up_at || !options_.ends_at_deadline) return;
  std::string standings;
  for (const int place : awaited) {
    standings += c10::str(". Rank ", name_of(place), " ", segment_.describe_standing(place),
                          state_of(rank_of(place)));
  }
  throw PeerError::explain(
      rank_of(awaited.front()),
      c10::str("rank ", name_of(awaited.front()), " did not answer within ",
               static_cast<double>(options_.deadline.count()) / 1000.0, " s", standings),
      /*timed_out=*/true);
}

// Ranks in different collectives meet and see for themselves; a pair of ranks does not.
void HostLink::look_for_ranks_out_of_step() const {
  const auto ours = segment_.standing_of(own());
  for (int place = 0; place < size() && ours; ++place) {
    const auto theirs = segment_.standing_of(place);
    if (place == own() || !theirs) continue;
    if (ours->call.operation != Operation::kPair && theirs->call.operation != Operation::kPair) {
      continue;
    }
    if (!never_meet(rank_of(own()), *ours, rank_of(place), *theirs, /*broadcasts_wait=*/true)) {
      continue;
    }
    throw PeerError::explain(rank_of(place),
                             c10::str("rank ", name_of(place), " is out of step: it waits in ",
                                      theirs->call.describe(), kSameOrder));
  }
}

void HostLink::meet(Moment give_up_at) {
  Header& common = header();
  const uint64_t round = rounds_ + 1;
  board(own()).arrivals.store(round, std::memory_order_release);
  const uint32_t arrived = common.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  // Counts modulo 2^32.
  if (arrived == static_cast<uint32_t>(round) * static_cast<uint32_t>(size())) {
    common.meetings.store(static_cast<uint32_t>(round), std::memory_order_seq_cst);
    if (common.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(common.meetings);
  } else {
    wait(
        common.meetings,
        [&] {
          return static_cast<int32_t>(common.meetings.load(std::memory_order_acquire) -
                                      static_cast<uint32_t>(round)) >= 0;
        },
        [&] {
          std::vector<int> missing;
          for (int place = 0; place < size(); ++place) {
            if (board(place).arrivals.load(std::memory_order_acquire) < round) {
              missing.push_back(place);
            }
          }
          return missing;
        },
        give_up_at);
  }
  rounds_ = round;
}

// ---- collectives ----

HostLink::Session::Session(HostLink& link, const Call& call, const Details& details,
                           const void* address)
    : link_(link), give_up_at_(Clock::now() + link.options_.deadline), number_(link.sessions_++) {
  Board& own = link.board(link.own());
  Announcement& announcement = own.announcements[number_ % 2];
  announcement = {.operation = call.operation,
                  .op = details.op,
                  .dtype = details.dtype,
                  .root = details.root < 0 ? -1 : link.options_.names[details.root],
                  .sequence = call.sequence,
                  .bytes = call.bytes,
                  .address = reinterpret_cast<uint64_t>(address),
                  .what = {}};
  announcement.what.assign(call.what);
  own.sessions.store(number_ + 1, std::memory_order_release);
}

std::byte* HostLink::Session::own_slot() {
  return link_.segment_.slot(link_.own(), link_.rounds_ + 1);
}

const std::byte* HostLink::Session::slot(int place) const {
  return link_.segment_.slot(place, link_.rounds_);
}

void HostLink::Session::meet() {
  link_.meet(give_up_at_);
  if (!std::exchange(met_, true)) check_announcements();
  link_.board(link_.own()).ended.store(number_ + 1, std::memory_order_release);
}

void HostLink::Session::check_announcements() const {
  const Announcement& ours = link_.board(link_.own()).announcements[number_ % 2];
  for (int place = 0; place < link_.size(); ++place) {
    const Announcement& theirs = link_.board(place).announcements[number_ % 2];
    if (theirs.agrees_with(ours)) continue;
    const std::string there = theirs.call().describe();
    const bool alike = there == ours.call().describe();
    throw PeerError::explain(
        link_.rank_of(place),
        c10::str("rank ", link_.name_of(place), " is out of step: it waits in ", there,
                 alike ? theirs.difference_from(ours) : std::string(), kSameOrder));
  }
}

void HostLink::Session::read(int place, int64_t offset, void* into, int64_t bytes) const {
  const uint64_t address = link_.board(place).announcements[number_ % 2].address;
  const PeerProcess& peer = link_.peers_[static_cast<size_t>(place)];
  const int error =
      peer.read(address + static_cast<uint64_t>(offset), into, static_cast<size_t>(bytes));
  if (error == 0) return;
  throw PeerError::explain(
      link_.rank_of(place),
      c10::str("lost rank ", link_.name_of(place), " (process ", peer.pid(), ", ",
               std::strerror(error),
               " reading its memory); it has ended or was killed. See the last lines "
               "of rank ",
               link_.name_of(place)));
}

// ---- pairs ----

class HostLink::PairScope {
 public:
  PairScope(PairRecord& record, const Call& call) : record_(record) {
    record_.sequence = call.sequence;
    record_.bytes = call.bytes;
    record_.peer = call.peer;
    record_.peer_name = call.peer_name;
    record_.end = call.end;
    record_.what.assign(call.what);
    record_.open.store(true, std::memory_order_release);
  }
  ~PairScope() { record_.open.store(false, std::memory_order_release); }
  PairScope(const PairScope&) = delete;
  PairScope& operator=(const PairScope&) = delete;

 private:
  PairRecord& record_;
};

void HostLink::send(int place, const Call& call, const void* data) {
  const PairScope scope(board(own()).pair, call);
  const Moment give_up_at = Clock::now() + options_.deadline;
  Lane& there = lane(own(), place);
  const auto awaited = [place] { return std::vector<int>{place}; };
  const auto post = [&] {
    there.posted.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(there.posted);
  };
  const auto wait_until_untaken_is = [&](uint32_t most) {
    wait(
        there.taken,
        [&] {
          return there.posted.load(std::memory_order_relaxed) -
                     there.taken.load(std::memory_order_acquire) <=
                 most;
        },
        awaited, give_up_at);
  };
  there.bytes = call.bytes;
  there.address = reads_peers_ ? reinterpret_cast<uint64_t>(data) : 0;
  if (reads_peers_ || call.bytes == 0) {
    post();
  } else {
    const auto* from = static_cast<const std::byte*>(data);
    for (int64_t first = 0; first < call.bytes; first += HostSegment::kOutboxBytes) {
      wait_until_untaken_is(1);
      const int64_t count = std::min(HostSegment::kOutboxBytes, call.bytes - first);
      std::memcpy(segment_.outbox(own(), there.posted.load()), from + first,
                  static_cast<size_t>(count));
      post();
    }
  }
  wait_until_untaken_is(0);
}

void HostLink::receive(int place, const Call& call, void* data) {
  const PairScope scope(board(own()).pair, call);
  const Moment give_up_at = Clock::now() + options_.deadline;
  Lane& there = lane(place, own());
  const auto wait_for_post = [&] {
    wait(
        there.posted,
        [&] {
          return there.posted.load(std::memory_order_acquire) !=
                 there.taken.load(std::memory_order_relaxed);
        },
        [place] { return std::vector<int>{place}; }, give_up_at);
  };
  const auto take = [&] {
    there.taken.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(there.taken);
  };
  wait_for_post();
  if (there.bytes != call.bytes) {
    throw PeerError::explain(
        rank_of(place), c10::str("rank ", name_of(place), " is out of step: it sends ", there.bytes,
                                 " bytes, this rank expects ", call.bytes, kSameOrder));
  }
  if (there.address != 0 && call.bytes > 0) {
    const PeerProcess& peer = peers_[static_cast<size_t>(place)];
    const int error = peer.read(there.address, data, static_cast<size_t>(call.bytes));
    if (error != 0) {
      throw PeerError::explain(
          rank_of(place), c10::str("lost rank ", name_of(place), " (process ", peer.pid(), ", ",
                                   std::strerror(error), ")"));
    }
    take();
    return;
  }
  auto* to = static_cast<std::byte*>(data);
  for (int64_t first = 0; first < call.bytes; first += HostSegment::kOutboxBytes) {
    wait_for_post();
    const int64_t count = std::min(HostSegment::kOutboxBytes, call.bytes - first);
    std::memcpy(to + first, segment_.outbox(place, there.taken.load()), static_cast<size_t>(count));
    take();
  }
  if (call.bytes == 0) take();
}

// ---- ending ----

std::vector<int> HostLink::lost_ranks() const {
  std::vector<int> lost;
  for (int place = 0; place < size(); ++place) {
    const auto condition = board(place).condition.load();
    if (place == own()) continue;
    if (condition != Condition::kPresent || peers_[static_cast<size_t>(place)].has_ended()) {
      lost.push_back(rank_of(place));
    }
  }
  return lost;
}

std::string HostLink::state_of(int rank) const {
  const auto& ranks = options_.ranks;
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end()) return "";
  const PeerProcess& peer = peers_[static_cast<size_t>(at - ranks.begin())];
  return c10::str("; its process ", peer.pid(), " ", peer.state());
}

void HostLink::fail(const Account& account) {
  const std::lock_guard lock(failing_);
  Board& ours = board(own());
  if (ours.condition.load() == Condition::kFailed) return;
  ours.account.assign(account.to_text());
  ours.condition.store(Condition::kFailed, std::memory_order_release);
  futex_wake_all(header().meetings);
}

void HostLink::abort() {
  aborted_ = true;
  futex_wake_all(header().meetings);
}

}  // namespace zeropage::comm::detail
