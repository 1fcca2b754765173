#include "comm/gloo/slice_messages.h"

#include <algorithm>

namespace zeropage::comm::detail {
namespace {

// Apart from the rounds of a reduction before it.
constexpr uint64_t kSliceRound = uint64_t{1} << 32;

}  // namespace

bool SliceMessages::is_far(int other) const {
  return std::find(far_.begin(), far_.end(), other) != far_.end();
}

void SliceMessages::send(GlooLink::Exchange& exchange, const Call& call, const at::Tensor& slice,
                         int to) {
  if (slice.numel() == 0) return;
  exchange.send(slice, to, call.tag(kSliceRound));
  sent_.add(call.operation, bytes_of(slice));
}

void SliceMessages::gather(const Call& call, const at::Tensor& own, const at::Tensor& whole,
                           const Slices& slices, int root) {
  GlooLink::Exchange exchange(link_);
  std::vector<size_t> tickets;
  if (rank_ == root) {
    for (const int peer : far_) {
      if (slices.count(peer) == 0) continue;
      tickets.push_back(exchange.recv(slices.of(whole, peer), peer, call.tag(kSliceRound)));
    }
  } else if (is_far(root)) {
    send(exchange, call, own, root);
  }
  for (const size_t ticket : tickets) exchange.wait_recv(ticket);
  exchange.wait_sends();
}

void SliceMessages::scatter(const Call& call, const at::Tensor& own, const at::Tensor& whole,
                            const Slices& slices, int root) {
  GlooLink::Exchange exchange(link_);
  if (rank_ == root) {
    for (const int peer : far_) send(exchange, call, slices.of(whole, peer), peer);
  } else if (is_far(root) && own.numel() > 0) {
    exchange.wait_recv(exchange.recv(own, root, call.tag(kSliceRound)));
  }
  exchange.wait_sends();
}

void SliceMessages::exchange(const Call& call, const at::Tensor& given, const at::Tensor& received,
                             const Slices& slices) {
  GlooLink::Exchange exchange(link_);
  std::vector<size_t> tickets;
  for (const int peer : far_) {
    if (slices.count(peer) == 0) continue;
    tickets.push_back(exchange.recv(slices.of(received, peer), peer, call.tag(kSliceRound)));
  }
  for (const int peer : far_) send(exchange, call, slices.of(given, peer), peer);
  for (const size_t ticket : tickets) exchange.wait_recv(ticket);
  exchange.wait_sends();
}

}  // namespace zeropage::comm::detail
