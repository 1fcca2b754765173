#include "comm/shared_memory/host_copies.h"

#include <algorithm>
#include <cstring>

#include "comm/detail/places.h"

namespace zeropage::comm::detail {
namespace {

using Session = HostLink::Session;

std::byte* bytes_in(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

int64_t most_held(const HostCopies::Held& held) {
  size_t most = 1;
  for (const std::vector<int>& slices : held) most = std::max(most, slices.size());
  return static_cast<int64_t>(most);
}

}  // namespace

bool HostCopies::gathers_through_slots(const at::Tensor& whole, const Slices& slices,
                                       const Held& held) const {
  const int64_t most_bytes =
      slices.slice_numel * static_cast<int64_t>(whole.element_size()) * most_held(held);
  return most_bytes <= HostLink::kSlotBytes || !peers_.reads_memory();
}

void HostCopies::gather_through_slots(Session& session, const at::Tensor& whole,
                                      const Slices& slices, const Held& held) const {
  const auto element_bytes = static_cast<int64_t>(whole.element_size());
  const int64_t round_numel = HostLink::kSlotBytes / element_bytes / most_held(held);
  int64_t first = 0;
  // copy(in the tensor, offset in the holder's slot, bytes) for each piece that a place holds.
  const auto for_each_piece = [&](int place, auto copy) {
    int64_t offset = 0;
    for (const int slice : held[static_cast<size_t>(place)]) {
      const int64_t numel = std::clamp<int64_t>(slices.count(slice) - first, 0, round_numel);
      if (numel > 0) {
        copy(bytes_in(whole) + (slices.first(slice) + first) * element_bytes, offset,
             static_cast<size_t>(numel * element_bytes));
      }
      offset += round_numel * element_bytes;
    }
  };
  do {
    std::byte* own_slot = session.own_slot();
    for_each_piece(peers_.own(), [&](const std::byte* piece, int64_t offset, size_t bytes) {
      std::memcpy(own_slot + offset, piece, bytes);
    });
    session.meet();
    for_each_other(peers_.own(), peers_.size(), [&](int place) {
      const std::byte* slot = session.slot(place);
      for_each_piece(place, [&](std::byte* piece, int64_t offset, size_t bytes) {
        std::memcpy(piece, slot + offset, bytes);
      });
    });
    first += round_numel;
  } while (first < slices.slice_numel);
}

void HostCopies::gather_from_peers(const Session& session, const at::Tensor& whole,
                                   const Slices& slices, const Held& held) const {
  const auto element_bytes = static_cast<int64_t>(whole.element_size());
  for_each_other(peers_.own(), peers_.size(), [&](int place) {
    for (const int slice : held[static_cast<size_t>(place)]) {
      const int64_t offset = slices.first(slice) * element_bytes;
      session.read(place, offset, bytes_in(whole) + offset, slices.count(slice) * element_bytes);
    }
  });
}

void HostCopies::broadcast(Session& session, const at::Tensor& tensor, int root_place) const {
  if (bytes_of(tensor) <= HostLink::kSlotBytes || !peers_.reads_memory()) {
    broadcast_through_slots(session, tensor, root_place);
    return;
  }
  session.meet();
  if (peers_.own() != root_place) session.read(root_place, 0, tensor.data_ptr(), bytes_of(tensor));
  session.meet();
}

void HostCopies::broadcast_through_slots(Session& session, const at::Tensor& tensor,
                                         int root_place) const {
  int64_t first = 0;
  do {
    const auto piece =
        static_cast<size_t>(std::min<int64_t>(HostLink::kSlotBytes, bytes_of(tensor) - first));
    const bool is_root = peers_.own() == root_place;
    if (is_root && piece > 0) std::memcpy(session.own_slot(), bytes_in(tensor) + first, piece);
    session.meet();
    if (!is_root && piece > 0) {
      std::memcpy(bytes_in(tensor) + first, session.slot(root_place), piece);
    }
    first += HostLink::kSlotBytes;
  } while (first < bytes_of(tensor));
}

}  // namespace zeropage::comm::detail
