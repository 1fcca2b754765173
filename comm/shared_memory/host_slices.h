// How ranks of a host give each other slices: to one of them, from one, and from each to each. Through slots, or
// straight from the owner's tensor where the kernel allows it and the slices are long.
//
// Every rank of the host calls the same within the same session.
//
// Lifetime: the peers must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include "comm/detail/call.h"
#include "comm/shared_memory/host_link.h"

namespace zeropage::comm::detail {

class HostSlices {
 public:
  explicit HostSlices(const HostPeers& peers) : peers_(peers) {}

  // A slice's bytes, by rank, and where a rank has its own in the tensor that it announced.
  struct Parts {
    Slices slices;
    int64_t element_bytes = 1;
    bool own_lies_in_whole = false;  // else at the tensor's beginning

    static Parts even(const at::Tensor& whole, int ranks) {
      return {.slices = Slices::even(whole.numel(), ranks),
              .element_bytes = static_cast<int64_t>(whole.element_size())};
    }
    // tensor: the root's whole, or the slice of another.
    static Parts with_root(const at::Tensor& tensor, bool is_root, int ranks) {
      return {.slices = Slices::even(tensor.numel() * (is_root ? 1 : ranks), ranks),
              .element_bytes = static_cast<int64_t>(tensor.element_size())};
    }

    int64_t offset(int rank) const { return slices.first(rank) * element_bytes; }
    int64_t bytes(int rank) const { return slices.count(rank) * element_bytes; }
    int64_t all_bytes() const { return slices.numel * element_bytes; }
    int64_t most_bytes() const { return slices.slice_numel * element_bytes; }
  };

  // tensor: as it was announced.
  void gather(HostLink::Session& session, const Parts& parts, const at::Tensor& tensor,
              int root_place) const;
  void scatter(HostLink::Session& session, const Parts& parts, const at::Tensor& tensor,
               int root_place) const;
  // given: as it was announced.
  void exchange(HostLink::Session& session, const Parts& parts, const at::Tensor& given,
                const at::Tensor& received) const;

 private:
  bool passes_slots(const Parts& parts, int64_t room) const;
  template <typename PutDown, typename PickUp>
  void in_rounds(HostLink::Session& session, const Parts& parts, int64_t room, PutDown put_down,
                 PickUp pick_up) const;
  template <typename BytesOfPiece>
  void put_down_for_others(HostLink::Session& session, const Parts& parts, const at::Tensor& whole,
                           int64_t room, int64_t first, BytesOfPiece bytes_of_piece) const;

  const HostPeers& peers_;
};

}  // namespace zeropage::comm::detail
