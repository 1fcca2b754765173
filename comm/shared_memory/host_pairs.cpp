#include "comm/shared_memory/host_pairs.h"

#include <algorithm>
#include <cstring>

#include "comm/detail/peer_error.h"
#include "comm/watch/rank_status.h"

namespace zeropage::comm::detail {
namespace {

using Lane = HostSegment::Lane;
using PairRecord = HostSegment::PairRecord;

// Tells the others which pair this rank is in.
class PairScope {
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

}  // namespace

void HostPairs::send(int place, const Call& call, const void* data) {
  const PairScope scope(segment_.board(peers_.own()).pair, call);
  const HostWait::Moment give_up_at = wait_.give_up_at();
  Lane& there = segment_.lane(peers_.own(), place);
  const auto awaited = [place] { return std::vector<int>{place}; };
  const auto post = [&] {
    there.posted.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(there.posted);
  };
  const auto wait_until_untaken_is = [&](uint32_t most) {
    wait_.until(
        there.taken,
        [&] {
          return there.posted.load(std::memory_order_relaxed) -
                     there.taken.load(std::memory_order_acquire) <=
                 most;
        },
        awaited, give_up_at);
  };
  there.bytes = call.bytes;
  there.address = peers_.reads_memory() ? reinterpret_cast<uint64_t>(data) : 0;
  if (peers_.reads_memory() || call.bytes == 0) {
    post();
  } else {
    const auto* from = static_cast<const std::byte*>(data);
    for (int64_t first = 0; first < call.bytes; first += HostSegment::kOutboxBytes) {
      wait_until_untaken_is(1);
      const int64_t count = std::min(HostSegment::kOutboxBytes, call.bytes - first);
      std::memcpy(segment_.outbox(peers_.own(), there.posted.load()), from + first,
                  static_cast<size_t>(count));
      post();
    }
  }
  wait_until_untaken_is(0);
  there.sent.fetch_add(1, std::memory_order_release);
}

void HostPairs::receive(int place, const Call& call, void* data) {
  const PairScope scope(segment_.board(peers_.own()).pair, call);
  const HostWait::Moment give_up_at = wait_.give_up_at();
  Lane& there = segment_.lane(place, peers_.own());
  const auto wait_for_post = [&] {
    wait_.until(
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
        peers_.rank_of(place),
        c10::str("rank ", peers_.name_of(place), " is out of step: it sends ", there.bytes,
                 " bytes, this rank expects ", call.bytes, kSameOrder));
  }
  if (there.address != 0 && call.bytes > 0) {
    peers_.read(place, there.address, data, call.bytes);
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

}  // namespace zeropage::comm::detail
