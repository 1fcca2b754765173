#include "comm/shared_memory/host_slices.h"

#include <algorithm>
#include <cstring>

#include "comm/detail/places.h"

namespace zeropage::comm::detail {
namespace {

std::byte* bytes_at(const at::Tensor& tensor, int64_t offset) {
  return static_cast<std::byte*>(tensor.data_ptr()) + offset;
}

void copy_to(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

// room: for a slice in a slot.
bool HostSlices::passes_slots(const Parts& parts, int64_t room) const {
  return parts.most_bytes() <= room || !peers_.reads_memory();
}

// Each slice in pieces of `room` bytes: put_down(first, bytes_of) and pick_up(first, bytes_of), with
// bytes_of(rank) of the piece that begins at `first` in its slice.
template <typename PutDown, typename PickUp>
void HostSlices::in_rounds(HostLink::Session& session, const Parts& parts, int64_t room,
                           PutDown put_down, PickUp pick_up) const {
  int64_t first = 0;
  do {
    const auto bytes_of_piece = [&](int rank) {
      return std::clamp<int64_t>(parts.bytes(rank) - first, 0, room);
    };
    put_down(first, bytes_of_piece);
    session.meet();
    pick_up(first, bytes_of_piece);
    first += room;
  } while (first < parts.most_bytes());
}

// A piece of each other rank's slice of `whole`, in the own slot: `room` bytes a place.
template <typename BytesOfPiece>
void HostSlices::put_down_for_others(HostLink::Session& session, const Parts& parts,
                                     const at::Tensor& whole, int64_t room, int64_t first,
                                     BytesOfPiece bytes_of_piece) const {
  for_each_other(peers_.own(), peers_.size(), [&](int place) {
    const int rank = peers_.rank_of(place);
    if (bytes_of_piece(rank) == 0) return;
    copy_to(session.own_slot() + place * room, bytes_at(whole, parts.offset(rank) + first),
            bytes_of_piece(rank));
  });
}

void HostSlices::gather(HostLink::Session& session, const Parts& parts, const at::Tensor& tensor,
                        int root_place) const {
  const bool is_root = peers_.own() == root_place;
  const auto own_offset = [&](int rank) {
    return parts.own_lies_in_whole ? parts.offset(rank) : 0;
  };
  if (!passes_slots(parts, HostLink::kSlotBytes)) {
    session.meet();
    for_each_other(peers_.own(), peers_.size(), [&](int place) {
      const int rank = peers_.rank_of(place);
      if (!is_root || parts.bytes(rank) == 0) return;
      session.read(place, own_offset(rank), bytes_at(tensor, parts.offset(rank)),
                   parts.bytes(rank));
    });
    session.meet();
    return;
  }
  in_rounds(
      session, parts, HostLink::kSlotBytes,
      [&](int64_t first, auto bytes_of_piece) {
        const int own = peers_.rank_of(peers_.own());
        if (is_root || bytes_of_piece(own) == 0) return;
        copy_to(session.own_slot(), bytes_at(tensor, own_offset(own) + first), bytes_of_piece(own));
      },
      [&](int64_t first, auto bytes_of_piece) {
        for_each_other(peers_.own(), peers_.size(), [&](int place) {
          const int rank = peers_.rank_of(place);
          if (!is_root || bytes_of_piece(rank) == 0) return;
          copy_to(bytes_at(tensor, parts.offset(rank) + first), session.slot(place),
                  bytes_of_piece(rank));
        });
      });
}

void HostSlices::scatter(HostLink::Session& session, const Parts& parts, const at::Tensor& tensor,
                         int root_place) const {
  const bool is_root = peers_.own() == root_place;
  const int own = peers_.rank_of(peers_.own());
  const int64_t room = HostLink::kSlotBytes / peers_.size();
  if (!passes_slots(parts, room)) {
    session.meet();
    if (!is_root) {
      session.read(root_place, parts.offset(own), tensor.data_ptr(), parts.bytes(own));
    }
    session.meet();
    return;
  }
  in_rounds(
      session, parts, room,
      [&](int64_t first, auto bytes_of_piece) {
        if (is_root) put_down_for_others(session, parts, tensor, room, first, bytes_of_piece);
      },
      [&](int64_t first, auto bytes_of_piece) {
        if (is_root || bytes_of_piece(own) == 0) return;
        copy_to(bytes_at(tensor, first), session.slot(root_place) + peers_.own() * room,
                bytes_of_piece(own));
      });
}

void HostSlices::exchange(HostLink::Session& session, const Parts& parts, const at::Tensor& given,
                          const at::Tensor& received) const {
  const int own = peers_.rank_of(peers_.own());
  const int64_t room = HostLink::kSlotBytes / peers_.size();
  if (!passes_slots(parts, room)) {
    session.meet();
    for_each_other(peers_.own(), peers_.size(), [&](int place) {
      session.read(place, parts.offset(own),
                   bytes_at(received, parts.offset(peers_.rank_of(place))), parts.bytes(own));
    });
    session.meet();
    return;
  }
  in_rounds(
      session, parts, room,
      [&](int64_t first, auto bytes_of_piece) {
        put_down_for_others(session, parts, given, room, first, bytes_of_piece);
      },
      [&](int64_t first, auto bytes_of_piece) {
        for_each_other(peers_.own(), peers_.size(), [&](int place) {
          const int rank = peers_.rank_of(place);
          if (bytes_of_piece(rank) == 0) return;
          copy_to(bytes_at(received, parts.offset(rank) + first),
                  session.slot(place) + peers_.own() * room, bytes_of_piece(rank));
        });
      });
}

}  // namespace zeropage::comm::detail
