// One call of one operation, as errors, tags and counters name it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <c10/util/StringUtil.h>

#include "base/exact.h"
#include "comm/detail/rank_names.h"
#include "zeropage/bytes.h"
#include "zeropage/communicator.h"
#include "zeropage/simulation.h"

namespace zeropage::comm::detail {

using comm::kOperationCount;
using comm::name;
using comm::Operation;

// Up to here an all_reduce is one round of whole tensors: quicker than two rounds of slices.
inline constexpr int64_t kSmallBytes = memory::operator""_KiB(32);
// A slice to be reduced is sent in segments: long enough to amortise a message's handshake, short
// enough that adding one hides behind receiving the next.
inline constexpr int64_t kSegmentBytes = memory::operator""_KiB(512);

inline int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

struct Call {
  Operation operation = Operation::kBarrier;
  uint64_t sequence = 0;  // of this communicator's collectives; a pair of ranks counts its own
  int64_t bytes = 0;
  std::string what;
  // For an operation of a pair of ranks: which end this rank is, and the other rank.
  enum class End : uint8_t { kNone, kSends, kReceives };
  int peer = -1;
  End end = End::kNone;
  int peer_name = -1;  // what the other rank is called

  // all_gather #12 of page "blocks.1" (12.0 MiB), send #3 to rank 1 of a batch (4.0 KiB)
  std::string describe() const {
    std::string text = name(operation);
    std::string to;
    if (end == End::kSends) text = "send", to = c10::str(" to rank ", peer_name);
    if (end == End::kReceives) text = "recv", to = c10::str(" from rank ", peer_name);
    return c10::str(text, " #", sequence, to, " of ", what, " (", memory::format_bytes(bytes), ")");
  }

  // Ranks that are out of step, or at different pages, compute different tags, so their messages
  // never meet. The two ends of a send may call it what they like.
  uint64_t tag(uint64_t round) const {
    uint64_t hash = 0x9E3779B97F4A7C15ULL;
    const auto mix = [&hash](uint64_t part) {
      hash = (hash ^ part) * 0xBF58476D1CE4E5B9ULL;
      hash ^= hash >> 29;
    };
    mix(sequence);
    mix(static_cast<uint64_t>(operation));
    mix(static_cast<uint64_t>(bytes));
    mix(round);
    if (operation == Operation::kPair) return hash;
    for (const char letter : what) mix(static_cast<unsigned char>(letter));
    return hash;
  }
};

// Where each rank's slice of a tensor lies, in elements. The last slices may be short or empty.
struct Slices {
  int64_t numel = 0;
  int64_t slice_numel = 0;
  int root = -1;  // whose slice is all, while the others' are empty; -1: each rank has one

  static Slices even(int64_t numel, int ranks) {
    return {numel, base::div_ceil<int64_t>(numel, ranks), -1};
  }

  static Slices all_at(int root, int64_t numel) { return {numel, numel, root}; }

  int64_t first(int rank) const {
    if (root >= 0) return rank <= root ? 0 : numel;
    return std::min(numel, rank * slice_numel);
  }
  int64_t count(int rank) const { return first(rank + 1) - first(rank); }
  at::Tensor of(const at::Tensor& whole, int rank) const {
    return whole.narrow(0, first(rank), count(rank));
  }
};

inline void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (from.numel() > 0) {
    std::memcpy(to.data_ptr(), from.data_ptr(), static_cast<size_t>(bytes_of(from)));
  }
}

// Makes the calls of one communicator and numbers them. Owned by the thread that calls.
class CallNumbers {
 public:
  explicit CallNumbers(int size, RankNames names = {})
      : names_(std::move(names)),
        sent_(static_cast<size_t>(size)),
        received_(static_cast<size_t>(size)) {}

  Call collective(Operation operation, const at::Tensor& tensor, std::string what) {
    return collective(operation, bytes_of(tensor), std::move(what));
  }
  // bytes: of what all ranks have together.
  Call collective(Operation operation, int64_t bytes, std::string what) {
    return {operation, next_++, bytes, std::move(what)};
  }
  Call send(const at::Tensor& tensor, int to_rank, std::string what) {
    return pair(tensor, std::move(what), to_rank, Call::End::kSends, sent_);
  }
  Call recv(const at::Tensor& tensor, int from_rank, std::string what) {
    return pair(tensor, std::move(what), from_rank, Call::End::kReceives, received_);
  }

 private:
  Call pair(const at::Tensor& tensor, std::string what, int peer, Call::End end,
            std::vector<uint64_t>& numbers) const {
    return {.operation = Operation::kPair,
            .sequence = numbers[static_cast<size_t>(peer)]++,
            .bytes = bytes_of(tensor),
            .what = std::move(what),
            .peer = peer,
            .end = end,
            .peer_name = names_[peer]};
  }

  const RankNames names_;
  uint64_t next_ = 0;  // of collectives
  // Send and recv are not collective, so they are counted for each pair of ranks.
  std::vector<uint64_t> sent_;
  std::vector<uint64_t> received_;
};

// Counts on one thread, is read from any.
class TrafficCounter {
 public:
  void add(Operation operation, int64_t bytes, int64_t messages = 1) {
    Count& count = counts_[static_cast<size_t>(operation)];
    count.bytes.fetch_add(bytes, std::memory_order_relaxed);
    count.messages.fetch_add(messages, std::memory_order_relaxed);
  }

  WireTraffic total() const {
    const auto of = [this](Operation operation) {
      const Count& count = counts_[static_cast<size_t>(operation)];
      return Traffic{count.bytes.load(std::memory_order_relaxed),
                     count.messages.load(std::memory_order_relaxed)};
    };
    return {of(Operation::kAllGather), of(Operation::kReduceScatter), of(Operation::kAllReduce),
            of(Operation::kBroadcast), of(Operation::kPair),          of(Operation::kBarrier),
            of(Operation::kReduce),    of(Operation::kGather),        of(Operation::kScatter),
            of(Operation::kAllToAll)};
  }

 private:
  struct Count {
    std::atomic<int64_t> bytes{0};
    std::atomic<int64_t> messages{0};
  };
  std::array<Count, kOperationCount> counts_;
};

}  // namespace zeropage::comm::detail
