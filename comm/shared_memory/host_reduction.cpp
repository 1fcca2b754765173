#include "comm/shared_memory/host_reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "comm/detail/places.h"
#include "zeropage/bytes.h"
#include "zeropage/communicator.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {
namespace {

using memory::operator""_KiB;
using Session = HostLink::Session;

// What is read of each rank before it is reduced: with the contributions of a few ranks it stays in
// the second-level cache.
constexpr int64_t kPeerSegmentBytes = 128_KiB;

std::byte* begin_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

void HostReduction::reduce_from_peers(const Session& session, const at::Tensor& whole,
                                      const Slices& slices, ReduceOp op) {
  const auto element_bytes = static_cast<int64_t>(whole.element_size());
  const int64_t segment_numel = kPeerSegmentBytes / element_bytes;
  const int64_t end = slices.first(peers_.own()) + slices.count(peers_.own());
  std::byte* staging = this->staging();
  std::vector<const void*> contributions(static_cast<size_t>(peers_.size()));
  for (int64_t first = slices.first(peers_.own()); first < end; first += segment_numel) {
    const int64_t numel = std::min(segment_numel, end - first);
    std::byte* own = begin_of(whole) + first * element_bytes;
    contributions[static_cast<size_t>(peers_.own())] = own;
    std::byte* next = staging;
    for_each_other(peers_.own(), peers_.size(), [&](int peer) {
      session.read(peer, first * element_bytes, next, numel * element_bytes);
      contributions[static_cast<size_t>(peer)] = std::exchange(next, next + kPeerSegmentBytes);
    });
    reduce_in_rank_order(contributions, own, numel, whole.scalar_type(), op);
  }
}

// A round takes a piece of every slice: the ranks put theirs down, each reduces its own slice's,
// and puts the result down if all want it.
void HostReduction::reduce_through_slots(Session& session, const at::Tensor& whole,
                                         const Slices& slices, ReduceOp op, bool gather) const {
  const auto element_bytes = static_cast<int64_t>(whole.element_size());
  const int64_t round_numel = HostLink::kSlotBytes / element_bytes / peers_.size();
  std::vector<const void*> contributions(static_cast<size_t>(peers_.size()));
  int64_t first = 0;
  do {
    const auto numel_of = [&](int place) {
      return std::clamp<int64_t>(slices.count(place) - first, 0, round_numel);
    };
    const auto place_of = [&](int place) {
      return begin_of(whole) + (slices.first(place) + first) * element_bytes;
    };
    for_each_other(peers_.own(), peers_.size(), [&](int peer) {
      if (numel_of(peer) == 0) return;
      copy_bytes(session.own_slot() + peer * round_numel * element_bytes, place_of(peer),
                 numel_of(peer) * element_bytes);
    });
    session.meet();
    if (numel_of(peers_.own()) > 0) {
      for (int place = 0; place < peers_.size(); ++place) {
        contributions[static_cast<size_t>(place)] =
            session.slot(place) + peers_.own() * round_numel * element_bytes;
      }
      contributions[static_cast<size_t>(peers_.own())] = place_of(peers_.own());
      reduce_in_rank_order(contributions, place_of(peers_.own()), numel_of(peers_.own()),
                           whole.scalar_type(), op);
    }
    if (gather) {
      if (numel_of(peers_.own()) > 0) {
        copy_bytes(session.own_slot(), place_of(peers_.own()),
                   numel_of(peers_.own()) * element_bytes);
      }
      session.meet();
      for_each_other(peers_.own(), peers_.size(), [&](int peer) {
        if (numel_of(peer) == 0) return;
        copy_bytes(place_of(peer), session.slot(peer), numel_of(peer) * element_bytes);
      });
    }
    first += round_numel;
  } while (first < slices.slice_numel);
}

void HostReduction::reduce_slices(Session& session, const at::Tensor& whole, const Slices& slices,
                                  ReduceOp op) {
  if (goes_through_slots(bytes_of(whole))) {
    reduce_through_slots(session, whole, slices, op, /*gather=*/false);
    return;
  }
  session.meet();
  reduce_from_peers(session, whole, slices, op);
  session.meet();
}

void HostReduction::reduce_everywhere(Session& session, const at::Tensor& tensor,
                                      ReduceOp op) const {
  if (tensor.numel() > 0) copy_bytes(session.own_slot(), begin_of(tensor), bytes_of(tensor));
  session.meet();
  std::vector<const void*> contributions;
  for (int place = 0; place < peers_.size(); ++place) contributions.push_back(session.slot(place));
  reduce_in_rank_order(contributions, tensor.data_ptr(), tensor.numel(), tensor.scalar_type(), op);
}

std::byte* HostReduction::staging() {
  if (!staging_.defined()) {
    const memory::KindScope kind(memory::Kind::kStaging);
    staging_ = at::empty({(peers_.size() - 1) * kPeerSegmentBytes}, at::kByte);
  }
  return begin_of(staging_);
}

}  // namespace zeropage::comm::detail
