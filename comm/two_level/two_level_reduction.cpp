#include "comm/two_level/two_level_reduction.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include <ATen/ops/empty.h>

#include "base/exact.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

// One reduction of one tensor.
class TwoLevelReduction::Run {
 public:
  Run(TwoLevelReduction& shared, const Call& call, HostLink::Session& session,
      const at::Tensor& whole, const Slices& slices, ReduceOp op)
      : shared_(shared),
        topology_(shared.topology_),
        call_(call),
        session_(session),
        whole_(whole),
        slices_(slices),
        op_(op),
        dtype_(whole.scalar_type()),
        element_bytes_(static_cast<int64_t>(whole.element_size())),
        through_slots_(call.bytes <= HostLink::kSlotBytes || !shared.peers_.reads_memory()),
        segment_numel_(through_slots_
                           ? HostLink::kSlotBytes / element_bytes_ / topology_.size()
                           : kSegmentBytes /
                                 static_cast<int64_t>(c10::elementSize(accumulator_of(dtype_)))),
        segments_(base::div_ceil(slices.slice_numel, segment_numel_)),
        exchange_(shared.messages_) {}

  void perform() {
    count_within_host();
    if (!through_slots_) session_.meet();
    receive(0);
    int64_t segment = 0;
    do {
      receive(segment + 1);
      if (through_slots_) {
        put_down(segment);
        session_.meet();
      }
      for (size_t index = 0; index < shared_.collected_.size(); ++index) {
        send_partials(index, segment);
      }
      combine(segment);
    } while (++segment < segments_);
    exchange_.wait_sends();
    if (!through_slots_) session_.meet();
  }

 private:
  int64_t numel_of(int owner, int64_t segment) const {
    return std::clamp<int64_t>(slices_.count(owner) - segment * segment_numel_, 0, segment_numel_);
  }
  int64_t first_of(int owner, int64_t segment) const {
    return slices_.first(owner) + segment * segment_numel_;
  }
  std::byte* in_tensor(int owner, int64_t segment) const {
    return static_cast<std::byte*>(whole_.data_ptr()) + first_of(owner, segment) * element_bytes_;
  }
  c10::ScalarType dtype_of(const RankRange& subtree) const {
    return subtree.size() == 1 ? dtype_ : accumulator_of(dtype_);
  }
  uint64_t tag(const RankRange& subtree, int64_t segment) const {
    return call_.tag(static_cast<uint64_t>(segment * topology_.size() + subtree.begin));
  }

  // What others read of this rank.
  void count_within_host() {
    for (int owner = 0; owner < topology_.size(); ++owner) {
      const int64_t bytes = slices_.count(owner) * element_bytes_;
      const bool is_read = topology_.counterpart(owner, shared_.own_host_) != shared_.rank_;
      if (is_read && bytes > 0) shared_.sent_.add(call_.operation, bytes);
    }
  }

  // Calls visit(host, subtree, index) for each partial that comes from another host.
  template <typename Visit>
  void for_each_incoming(Visit visit) const {
    size_t index = 0;
    for (int host = 0; host < topology_.hosts(); ++host) {
      if (host == shared_.own_host_) continue;
      for (const RankRange& subtree : shared_.subtrees_[static_cast<size_t>(host)]) {
        visit(host, subtree, index++);
      }
    }
  }

  at::Tensor incoming(size_t index, int64_t segment) const {
    return shared_.buffer(shared_.incoming_, 2 * index + static_cast<size_t>(segment % 2));
  }

  void receive(int64_t segment) {
    const int64_t numel = numel_of(shared_.rank_, segment);
    if (numel == 0) return;
    std::vector<size_t>& tickets = incoming_tickets_[segment % 2];
    tickets.clear();
    for_each_incoming([&](int host, const RankRange& subtree, size_t index) {
      const at::Tensor buffer =
          incoming(index, segment).view(dtype_of(subtree)).narrow(0, 0, numel);
      tickets.push_back(exchange_.recv(buffer, topology_.counterpart(shared_.rank_, host),
                                       tag(subtree, segment)));
    });
  }

  // This rank's contributions to the segment of every slice that another of the host brings
  // together.
  void put_down(int64_t segment) {
    for (int owner = 0; owner < topology_.size(); ++owner) {
      const int64_t numel = numel_of(owner, segment);
      if (numel == 0 || topology_.counterpart(owner, shared_.own_host_) == shared_.rank_) continue;
      std::memcpy(session_.own_slot() + owner * segment_numel_ * element_bytes_,
                  in_tensor(owner, segment), static_cast<size_t>(numel * element_bytes_));
    }
  }

  // What a rank of this host has for `owner`.
  const void* contribution(int rank, int owner, int64_t segment) {
    if (rank == shared_.rank_) return in_tensor(owner, segment);
    const int place = topology_.index_in_host(rank);
    if (through_slots_) return session_.slot(place) + owner * segment_numel_ * element_bytes_;
    at::Tensor& into = shared_.buffer(shared_.read_, static_cast<size_t>(place));
    session_.read(place, first_of(owner, segment) * element_bytes_, into.data_ptr(),
                  numel_of(owner, segment) * element_bytes_);
    return into.data_ptr();
  }

  void make_partial(const RankRange& subtree, int owner, int64_t segment, void* partial) {
    const int64_t numel = numel_of(owner, segment);
    std::vector<const void*> contributions;
    for (int rank = subtree.begin; rank < subtree.end; ++rank) {
      contributions.push_back(contribution(rank, owner, segment));
    }
    if (subtree.size() == 1) {
      std::memcpy(partial, contributions.front(), static_cast<size_t>(numel * element_bytes_));
    } else {
      reduce_to_accumulators(contributions, partial, numel, dtype_, op_);
    }
  }

  void send_partials(size_t collected_index, int64_t segment) {
    const int owner = shared_.collected_[collected_index];
    const int64_t numel = numel_of(owner, segment);
    if (numel == 0) return;
    const auto& subtrees = shared_.subtrees_[static_cast<size_t>(shared_.own_host_)];
    for (size_t index = 0; index < subtrees.size(); ++index) {
      const size_t place =
          2 * (collected_index * subtrees.size() + index) + static_cast<size_t>(segment % 2);
      outgoing_tickets_.resize(std::max(outgoing_tickets_.size(), place + 1));
      std::optional<size_t>& ticket = outgoing_tickets_[place];
      if (ticket) exchange_.wait_send(*ticket);
      const at::Tensor partial = shared_.buffer(shared_.outgoing_, place)
                                     .view(dtype_of(subtrees[index]))
                                     .narrow(0, 0, numel);
      make_partial(subtrees[index], owner, segment, partial.data_ptr());
      ticket = exchange_.send(partial, owner, tag(subtrees[index], segment));
      // However many segments it takes, it is one message.
      shared_.sent_.add(call_.operation, bytes_of(partial), /*messages=*/segment == 0 ? 1 : 0);
    }
  }

  void combine(int64_t segment) {
    const int own = shared_.rank_;
    const int64_t numel = numel_of(own, segment);
    if (numel == 0) return;
    std::vector<Partial> partials;
    for (const int rank : topology_.ranks_of(shared_.own_host_)) {
      partials.push_back({{rank, rank + 1}, contribution(rank, own, segment)});
    }
    for_each_incoming([&](int /*host*/, const RankRange& subtree, size_t index) {
      exchange_.wait_recv(incoming_tickets_[segment % 2][index]);
      partials.push_back({subtree, incoming(index, segment).data_ptr()});
    });
    std::sort(partials.begin(), partials.end(), [](const Partial& left, const Partial& right) {
      return left.ranks.begin < right.ranks.begin;
    });
    combine_in_rank_order(partials, in_tensor(own, segment), numel, dtype_, op_);
  }

  TwoLevelReduction& shared_;
  const Topology& topology_;
  const Call& call_;
  HostLink::Session& session_;
  const at::Tensor& whole_;
  const Slices& slices_;
  const ReduceOp op_;
  const c10::ScalarType dtype_;
  const int64_t element_bytes_;
  const bool through_slots_;
  const int64_t segment_numel_;
  const int64_t segments_;
  GlooLink::Exchange exchange_;
  std::array<std::vector<size_t>, 2> incoming_tickets_;
  std::vector<std::optional<size_t>> outgoing_tickets_;  // by buffer
};

TwoLevelReduction::TwoLevelReduction(const Topology& topology, int rank, const HostPeers& peers,
                                     GlooLink& messages, TrafficCounter& sent)
    : topology_(topology),
      rank_(rank),
      own_host_(topology.host_of(rank)),
      peers_(peers),
      messages_(messages),
      sent_(sent) {
  for (int other = 0; other < topology.hosts(); ++other) {
    subtrees_.push_back(maximal_subtrees(topology.ranks_of(other), topology.size()));
  }
  for (int owner = 0; owner < topology.size(); ++owner) {
    if (owner != rank && topology.counterpart(owner, own_host_) == rank) {
      collected_.push_back(owner);
    }
  }
}

void TwoLevelReduction::perform(const Call& call, HostLink::Session& session,
                                const at::Tensor& whole, const Slices& slices, ReduceOp op) {
  Run(*this, call, session, whole, slices, op).perform();
}

at::Tensor& TwoLevelReduction::buffer(std::vector<at::Tensor>& buffers, size_t index) const {
  if (buffers.size() <= index) buffers.resize(index + 1);
  at::Tensor& buffer = buffers[index];
  if (!buffer.defined()) {
    const memory::KindScope kind(memory::Kind::kStaging);
    buffer = at::empty({kSegmentBytes}, at::kByte);
  }
  return buffer;
}

}  // namespace zeropage::comm::detail
