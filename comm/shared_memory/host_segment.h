// What the ranks of one host have in common: a counter at which they meet, a board on which each says
// what it does, lanes between pairs, and room for bytes.
//
//   Header | Board a rank | Lane a pair of ranks | 2 slots a rank | 2 outbox chunks a rank
//
// Lifetime: owns the mapping. Threads, processes: what is atomic is for all; who writes the rest is
// said with it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <sys/types.h>

#include "comm/detail/call.h"
#include "comm/shared_memory/futex.h"
#include "comm/shared_memory/shared_segment.h"
#include "comm/watch/rank_status.h"

namespace zeropage::comm::detail {

// A text of bounded length. Who reads it may find it half written.
template <size_t capacity>
class SharedText {
 public:
  void assign(const std::string& text) {
    const size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(letters_.data(), text.data(), length);
    letters_[length] = '\0';
  }
  std::string str() const { return {letters_.data(), strnlen(letters_.data(), capacity)}; }
  friend bool operator==(const SharedText& left, const SharedText& right) {
    return left.str() == right.str();
  }

 private:
  std::array<char, capacity> letters_{};
};

class HostSegment {
 public:
  // Enough to amortise a meeting, little enough to stay in the second-level cache.
  static constexpr int64_t kSlotBytes = int64_t{256} << 10;
  static constexpr int64_t kOutboxBytes = int64_t{64} << 10;
  static constexpr size_t kCacheLine = 64;

  struct Header {
    alignas(kCacheLine) FutexWord arrivals{0};
    // The number of meetings that have taken place: what sleepers watch.
    alignas(kCacheLine) FutexWord meetings{0};
    FutexWord sleepers{0};
  };

  // A collective that a rank comes to.
  struct Announcement {
    Operation operation;
    ReduceOp op;
    at::ScalarType dtype;
    int root;
    uint64_t sequence;
    int64_t bytes;
    uint64_t address;  // of its tensor, in its own memory
    SharedText<160> what;

    Call call() const;
    bool agrees_with(const Announcement& other) const;
    // What differs where the descriptions are the same.
    std::string difference_from(const Announcement& other) const;
  };

  // A send or recv that a rank is in.
  struct PairRecord {
    std::atomic<bool> open{false};
    uint64_t sequence = 0;
    int64_t bytes = 0;
    int peer = -1;
    int peer_name = -1;
    Call::End end = Call::End::kNone;
    SharedText<160> what;
  };

  enum class Condition : uint32_t {
    kPresent,
    kFailed,
    kLeft,  // in order
    kGone,  // while an exception was on its way
  };

  // What a rank says of itself. Written by it alone.
  struct Board {
    alignas(kCacheLine) std::atomic<pid_t> pid{0};
    std::atomic<Condition> condition{Condition::kPresent};
    std::atomic<uint64_t> arrivals{0};  // meetings it has come to
    std::atomic<uint64_t> sessions{0};  // collectives begun
    std::atomic<uint64_t> ended{0};     // those of which it has seen the last meeting so far
    std::array<Announcement, 2> announcements{};  // of the sessions with that parity
    PairRecord pair;
    SharedText<1024> account;  // before condition is kFailed
  };

  // From one rank to another. `posted` is the sender's, `taken` the receiver's.
  struct Lane {
    alignas(kCacheLine) FutexWord posted{0};
    FutexWord taken{0};
    std::atomic<uint64_t> sent{0};  // messages, each taken to its end
    int64_t bytes = 0;              // of the whole message
    uint64_t address = 0;           // of it in the sender's memory; 0: it comes through the outbox
  };

  static size_t bytes_for(size_t ranks);

  // Writes what the rank at that place brings; the first one also what is of all.
  HostSegment(SharedSegment segment, int ranks, int own);

  int64_t bytes() const { return static_cast<int64_t>(segment_.bytes()); }
  Header& header() const;
  Board& board(int place) const;
  Lane& lane(int from, int to) const;
  std::byte* slot(int place, uint64_t round) const;    // two, in turn
  std::byte* outbox(int place, uint32_t chunk) const;  // two, in turn

  // The operation that a rank is in; nothing between two. The rank may be going on meanwhile.
  std::optional<RankStatus> standing_of(int place) const;
  // "stands at all_gather #12 of ...", "was last in ...", "has called nothing yet".
  std::string describe_standing(int place) const;

 private:
  SharedSegment segment_;
  int ranks_;
};

}  // namespace zeropage::comm::detail
