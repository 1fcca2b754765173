#include "comm/shared_memory/host_segment.h"

#include <new>
#include <utility>

#include "base/exact.h"

namespace zeropage::comm::detail {
namespace {

size_t whole_lines(size_t bytes) {
  return base::round_up(bytes, HostSegment::kCacheLine);
}

}  // namespace

Call HostSegment::Announcement::call() const {
  return {.operation = operation, .sequence = sequence, .bytes = bytes, .what = what.str()};
}

bool HostSegment::Announcement::agrees_with(const Announcement& other) const {
  return operation == other.operation && op == other.op && dtype == other.dtype &&
         root == other.root && sequence == other.sequence && bytes == other.bytes &&
         what == other.what;
}

std::string HostSegment::Announcement::difference_from(const Announcement& other) const {
  if (bytes != other.bytes) return c10::str(" of ", bytes, " bytes against ", other.bytes);
  if (dtype != other.dtype) return c10::str(" in ", dtype, " against ", other.dtype);
  if (root != other.root) return c10::str(" from rank ", root, " against rank ", other.root);
  return " with another reduction";
}

size_t HostSegment::bytes_for(size_t ranks) {
  const size_t control = whole_lines(sizeof(Header)) + ranks * whole_lines(sizeof(Board)) +
                         ranks * ranks * whole_lines(sizeof(Lane));
  return base::round_up<size_t>(control, 4096) +
         ranks * 2 * static_cast<size_t>(kSlotBytes + kOutboxBytes);
}

HostSegment::HostSegment(SharedSegment segment, int ranks, int own)
    : segment_(std::move(segment)), ranks_(ranks) {
  if (own == 0) {
    new (&header()) Header;
    for (int from = 0; from < ranks_; ++from) {
      for (int to = 0; to < ranks_; ++to) new (&lane(from, to)) Lane;
    }
  }
  new (&board(own)) Board;
}

HostSegment::Header& HostSegment::header() const {
  return *reinterpret_cast<Header*>(segment_.data());
}

HostSegment::Board& HostSegment::board(int place) const {
  std::byte* boards = segment_.data() + whole_lines(sizeof(Header));
  return *reinterpret_cast<Board*>(boards +
                                   static_cast<size_t>(place) * whole_lines(sizeof(Board)));
}

HostSegment::Lane& HostSegment::lane(int from, int to) const {
  const auto ranks = static_cast<size_t>(ranks_);
  std::byte* lanes =
      segment_.data() + whole_lines(sizeof(Header)) + ranks * whole_lines(sizeof(Board));
  const size_t index = static_cast<size_t>(from) * ranks + static_cast<size_t>(to);
  return *reinterpret_cast<Lane*>(lanes + index * whole_lines(sizeof(Lane)));
}

std::byte* HostSegment::slot(int place, uint64_t round) const {
  std::byte* end = segment_.data() + segment_.bytes() - 2 * ranks_ * kOutboxBytes;
  return end - (2 * (ranks_ - place) - static_cast<int64_t>(round % 2)) * kSlotBytes;
}

std::byte* HostSegment::outbox(int place, uint32_t chunk) const {
  std::byte* end = segment_.data() + segment_.bytes();
  return end - (2 * (ranks_ - place) - static_cast<int64_t>(chunk % 2)) * kOutboxBytes;
}

std::optional<RankStatus> HostSegment::standing_of(int place) const {
  const Board& of_peer = board(place);
  const uint64_t begun = of_peer.sessions.load(std::memory_order_acquire);
  if (of_peer.pair.open.load(std::memory_order_acquire)) {
    const PairRecord& pair = of_peer.pair;
    return RankStatus{.begun = begun,
                      .call = {.operation = Operation::kPair,
                               .sequence = pair.sequence,
                               .bytes = pair.bytes,
                               .what = pair.what.str(),
                               .peer = pair.peer,
                               .end = pair.end,
                               .peer_name = pair.peer_name}};
  }
  if (of_peer.ended.load(std::memory_order_acquire) >= begun) return std::nullopt;
  return RankStatus{.begun = begun, .call = of_peer.announcements[(begun - 1) % 2].call()};
}

std::string HostSegment::describe_standing(int place) const {
  if (const auto status = standing_of(place)) return "stands at " + status->call.describe();
  const uint64_t begun = board(place).sessions.load(std::memory_order_acquire);
  if (begun == 0) return "has called nothing yet";
  return "was last in " + board(place).announcements[(begun - 1) % 2].call().describe();
}

}  // namespace zeropage::comm::detail
