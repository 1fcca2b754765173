#include "comm/detail/host_link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <new>
#include <sys/prctl.h>
#include <unistd.h>
#include <utility>

#include "memory/check.h"
#include "memory/exact.h"

namespace zeropage::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kCacheLine = 64;
// About two microseconds awake; with more ranks than cores a longer look would keep the awaited rank
// from its core.
constexpr int kLooksAwake = 64;
constexpr auto kLookAround = std::chrono::milliseconds(100);
// What a rank tries to read in another's memory.
constexpr uint64_t kCookie = 0x5A65726F70616765ULL;

constexpr const char* kSameOrder =
    "; all ranks must call the same operations on the same sizes in the same order";

// A rank waits this long before it asks itself whether the others wait for it in something else.
std::chrono::milliseconds patience_for(std::chrono::milliseconds deadline) {
  return std::min<std::chrono::milliseconds>(std::chrono::seconds(1), deadline / 4);
}

template <size_t capacity>
void copy_text(std::array<char, capacity>& to, const std::string& from) {
  const size_t length = std::min(from.size(), capacity - 1);
  std::memcpy(to.data(), from.data(), length);
  to[length] = '\0';
}

// The other side may be writing.
template <size_t capacity>
std::string text_of(const std::array<char, capacity>& text) {
  return {text.data(), strnlen(text.data(), capacity)};
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Yama's default lets a process be read by its ancestors only. Those started beside us by the same
// launcher, and nobody else, are let in.
void let_siblings_read() {
  std::ifstream scope("/proc/sys/kernel/yama/ptrace_scope");
  int value = 0;
  if (scope >> value && value == 1) prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
}

}  // namespace

enum class Condition : uint32_t { kPresent, kFailed, kLeft };

struct HostLink::Announcement {
  Operation operation;
  ReduceOp op;
  at::ScalarType dtype;
  int root;
  uint64_t sequence;
  int64_t bytes;
  uint64_t address;
  std::array<char, 160> what;

  Call call() const {
    return {.operation = operation, .sequence = sequence, .bytes = bytes, .what = text_of(what)};
  }

  bool agrees_with(const Announcement& other) const {
    return operation == other.operation && op == other.op && dtype == other.dtype &&
           root == other.root && sequence == other.sequence && bytes == other.bytes &&
           what == other.what;
  }

  // What differs where the descriptions are the same.
  std::string difference_from(const Announcement& other) const {
    if (bytes != other.bytes) return c10::str(" of ", bytes, " bytes against ", other.bytes);
    if (dtype != other.dtype) return c10::str(" in ", dtype, " against ", other.dtype);
    if (root != other.root) return c10::str(" from rank ", root, " against rank ", other.root);
    return " with another reduction or a longer name";
  }
};

// A send or recv that a rank is in.
struct HostLink::PairRecord {
  std::atomic<bool> open{false};
  uint64_t sequence = 0;
  int64_t bytes = 0;
  int peer = -1;
  Call::End end = Call::End::kNone;
  std::array<char, 160> what{};
};

struct HostLink::Header {
  alignas(kCacheLine) FutexWord arrivals{0};
  // The number of meetings that have taken place: what sleepers watch.
  alignas(kCacheLine) FutexWord meetings{0};
  FutexWord sleepers{0};
};

// What a rank says of itself. Written by it alone.
struct HostLink::Board {
  alignas(kCacheLine) std::atomic<pid_t> pid{0};
  std::atomic<uint32_t> condition{0};
  std::atomic<uint64_t> arrivals{0};            // meetings it has come to
  std::atomic<uint64_t> sessions{0};            // begun
  std::atomic<uint64_t> ended{0};               // sessions of which it has seen the last meeting
  std::array<Announcement, 2> announcements{};  // of the sessions with that parity
  PairRecord pair;
  std::array<char, 1024> account{};  // before condition is kFailed
};

// From one rank to another. `posted` is the sender's, `taken` the receiver's.
struct HostLink::Lane {
  alignas(kCacheLine) FutexWord posted{0};
  FutexWord taken{0};
  int64_t bytes = 0;     // of the whole message
  uint64_t address = 0;  // of the message in the sender's memory; 0: it comes through the outbox
};

namespace {

constexpr size_t kOutboxBytes = size_t{64} << 10;  // a chunk; there are two

size_t whole_lines(size_t bytes) {
  return memory::round_up(bytes, kCacheLine);
}

}  // namespace

size_t HostLink::segment_bytes(size_t ranks) {
  const size_t control = whole_lines(sizeof(Header)) + ranks * whole_lines(sizeof(Board)) +
                         ranks * ranks * whole_lines(sizeof(Lane));
  return memory::round_up<size_t>(control, 4096) +
         ranks * (2 * static_cast<size_t>(kSlotBytes) + 2 * kOutboxBytes);
}

HostLink::HostLink(SharedSegment segment, const Options& options)
    : segment_(std::move(segment)), options_(options), peers_(options.ranks.size()) {
  if (own() == 0) {
    new (&header()) Header;
    for (int from = 0; from < size(); ++from) {
      for (int to = 0; to < size(); ++to) new (&lane(from, to)) Lane;
    }
  }
  new (&board(own())) Board;
  board(own()).announcements[0].address = reinterpret_cast<uint64_t>(&kCookie);
  board(own()).pid.store(getpid(), std::memory_order_release);
  let_siblings_read();
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
      return c10::str("rank ", rank_of(own()), " cannot read the memory of rank ", rank_of(place),
                      " (process ", peer.pid(), "): ", std::strerror(error));
    }
  }
  return "";
}

HostLink::~HostLink() {
  uint32_t present = static_cast<uint32_t>(Condition::kPresent);
  board(own()).condition.compare_exchange_strong(present, static_cast<uint32_t>(Condition::kLeft));
  futex_wake_all(header().meetings);
}

HostLink::Header& HostLink::header() const {
  return *reinterpret_cast<Header*>(segment_.data());
}

HostLink::Board& HostLink::board(int place) const {
  std::byte* boards = segment_.data() + whole_lines(sizeof(Header));
  return *reinterpret_cast<Board*>(boards +
                                   static_cast<size_t>(place) * whole_lines(sizeof(Board)));
}

HostLink::Lane& HostLink::lane(int from, int to) const {
  const auto ranks = static_cast<size_t>(size());
  std::byte* lanes =
      segment_.data() + whole_lines(sizeof(Header)) + ranks * whole_lines(sizeof(Board));
  const size_t index = static_cast<size_t>(from) * ranks + static_cast<size_t>(to);
  return *reinterpret_cast<Lane*>(lanes + index * whole_lines(sizeof(Lane)));
}

std::byte* HostLink::slot(int place, uint64_t round) const {
  const auto from_end = 2 * static_cast<size_t>(size() - place);
  std::byte* slots = segment_.data() + segment_.bytes() -
                     static_cast<size_t>(size()) * 2 * kOutboxBytes -
                     from_end * static_cast<size_t>(kSlotBytes);
  return slots + (round % 2) * static_cast<size_t>(kSlotBytes);
}

std::byte* HostLink::outbox(int place, uint32_t chunk) const {
  const auto from_end = 2 * static_cast<size_t>(size() - place);
  return segment_.data() + segment_.bytes() - from_end * kOutboxBytes + (chunk % 2) * kOutboxBytes;
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
    const auto condition = static_cast<Condition>(board(place).condition.load());
    if (condition == Condition::kFailed && place != own()) {
      throw PeerError::explain(
          rank, "rank " + std::to_string(rank) + " had failed in " + text_of(board(place).account));
    }
    const PeerProcess& peer = peers_[static_cast<size_t>(place)];
    if (peer.has_ended() && condition != Condition::kLeft) {
      throw PeerError::explain(rank, c10::str("lost rank ", rank, " (process ", peer.pid(),
                                              "); it has ended or was killed. Rank ", rank, " ",
                                              describe_standing(place), "; see its last lines"));
    }
  }
  for (const int place : awaited) {
    if (static_cast<Condition>(board(place).condition.load()) == Condition::kLeft) {
      throw PeerError::explain(
          rank_of(place),
          c10::str("lost rank ", rank_of(place), ": it let its world go. Rank ", rank_of(place),
                   " ", describe_standing(place), "; all ranks must call the same operations"));
    }
  }
  if (awaited.empty()) return;
  const auto now = Clock::now();
  if (now > give_up_at - options_.deadline + patience_for(options_.deadline)) {
    look_for_ranks_out_of_step();
  }
  if (now < give_up_at) return;
  std::string standings;
  for (const int place : awaited) {
    const PeerProcess& peer = peers_[static_cast<size_t>(place)];
    standings += c10::str(". Rank ", rank_of(place), " ", describe_standing(place),
                          "; its process ", peer.pid(), " ", peer.state());
  }
  throw PeerError::explain(
      rank_of(awaited.front()),
      c10::str("rank ", rank_of(awaited.front()), " did not answer within ",
               static_cast<double>(options_.deadline.count()) / 1000.0, " s", standings),
      /*timed_out=*/true);
}

// Ranks in different collectives meet and see for themselves; a pair of ranks does not.
void HostLink::look_for_ranks_out_of_step() const {
  const auto ours = standing_of(own());
  for (int place = 0; place < size() && ours; ++place) {
    const auto theirs = standing_of(place);
    if (place == own() || !theirs) continue;
    if (ours->call.operation != Operation::kPair && theirs->call.operation != Operation::kPair) {
      continue;
    }
    if (!never_meet(rank_of(own()), *ours, rank_of(place), *theirs, /*broadcasts_wait=*/true)) {
      continue;
    }
    throw PeerError::explain(rank_of(place),
                             c10::str("rank ", rank_of(place), " is out of step: it waits in ",
                                      theirs->call.describe(), kSameOrder));
  }
}

// The operation that a rank is in; nothing between two. The rank may be going on meanwhile.
std::optional<Standing> HostLink::standing_of(int place) const {
  const Board& of_peer = board(place);
  const uint64_t begun = of_peer.sessions.load(std::memory_order_acquire);
  if (of_peer.pair.open.load(std::memory_order_acquire)) {
    const PairRecord& pair = of_peer.pair;
    return Standing{.begun = begun,
                    .call = {.operation = Operation::kPair,
                             .sequence = pair.sequence,
                             .bytes = pair.bytes,
                             .what = text_of(pair.what),
                             .peer = pair.peer,
                             .end = pair.end}};
  }
  if (of_peer.ended.load(std::memory_order_acquire) >= begun) return std::nullopt;
  return Standing{.begun = begun, .call = of_peer.announcements[(begun - 1) % 2].call()};
}

std::string HostLink::describe_standing(int place) const {
  if (const auto standing = standing_of(place)) return "stands at " + standing->call.describe();
  const uint64_t begun = board(place).sessions.load(std::memory_order_acquire);
  if (begun == 0) return "has called nothing yet";
  return "was last in " + board(place).announcements[(begun - 1) % 2].call().describe();
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
                  .root = details.root,
                  .sequence = call.sequence,
                  .bytes = call.bytes,
                  .address = reinterpret_cast<uint64_t>(address),
                  .what = {}};
  copy_text(announcement.what, call.what);
  own.sessions.store(number_ + 1, std::memory_order_release);
}

std::byte* HostLink::Session::own_slot() {
  return link_.slot(link_.own(), link_.rounds_ + 1);
}

const std::byte* HostLink::Session::slot(int place) const {
  return link_.slot(place, link_.rounds_);
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
    const int rank = link_.rank_of(place);
    const std::string there = theirs.call().describe();
    const bool alike = there == ours.call().describe();
    throw PeerError::explain(
        rank, c10::str("rank ", rank, " is out of step: it waits in ", there,
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
      c10::str("lost rank ", link_.rank_of(place), " (process ", peer.pid(), ", ",
               std::strerror(error),
               " reading its memory); it has ended or was killed. See the last lines "
               "of rank ",
               link_.rank_of(place)));
}

// ---- pairs ----

class HostLink::PairScope {
 public:
  PairScope(PairRecord& record, const Call& call) : record_(record) {
    record_.sequence = call.sequence;
    record_.bytes = call.bytes;
    record_.peer = call.peer;
    record_.end = call.end;
    copy_text(record_.what, call.what);
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
    for (int64_t first = 0; first < call.bytes; first += static_cast<int64_t>(kOutboxBytes)) {
      wait_until_untaken_is(1);
      const int64_t count = std::min(static_cast<int64_t>(kOutboxBytes), call.bytes - first);
      std::memcpy(outbox(own(), there.posted.load()), from + first, static_cast<size_t>(count));
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
        rank_of(place), c10::str("rank ", rank_of(place), " is out of step: it sends ", there.bytes,
                                 " bytes, this rank expects ", call.bytes, kSameOrder));
  }
  if (there.address != 0 && call.bytes > 0) {
    const PeerProcess& peer = peers_[static_cast<size_t>(place)];
    const int error = peer.read(there.address, data, static_cast<size_t>(call.bytes));
    if (error != 0) {
      throw PeerError::explain(
          rank_of(place), c10::str("lost rank ", rank_of(place), " (process ", peer.pid(), ", ",
                                   std::strerror(error), ")"));
    }
    take();
    return;
  }
  auto* to = static_cast<std::byte*>(data);
  for (int64_t first = 0; first < call.bytes; first += static_cast<int64_t>(kOutboxBytes)) {
    wait_for_post();
    const int64_t count = std::min(static_cast<int64_t>(kOutboxBytes), call.bytes - first);
    std::memcpy(to + first, outbox(place, there.taken.load()), static_cast<size_t>(count));
    take();
  }
  if (call.bytes == 0) take();
}

// ---- ending ----

std::vector<int> HostLink::lost_ranks() const {
  std::vector<int> lost;
  for (int place = 0; place < size(); ++place) {
    const auto condition = static_cast<Condition>(board(place).condition.load());
    if (place == own() || condition == Condition::kLeft) continue;
    if (condition == Condition::kFailed || peers_[static_cast<size_t>(place)].has_ended()) {
      lost.push_back(rank_of(place));
    }
  }
  return lost;
}

void HostLink::fail(const std::string& account) {
  Board& ours = board(own());
  copy_text(ours.account, account);
  ours.condition.store(static_cast<uint32_t>(Condition::kFailed), std::memory_order_release);
  futex_wake_all(header().meetings);
}

void HostLink::abort() {
  aborted_ = true;
  futex_wake_all(header().meetings);
}

}  // namespace zeropage::comm::detail
