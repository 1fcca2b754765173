#include "comm/gloo/message_rounds.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "comm/detail/places.h"
#include "zeropage/communicator.h"

namespace zeropage::comm::detail {
namespace {

using Exchange = GlooLink::Exchange;

}  // namespace

void MessageRounds::reduce_everywhere(const Call& call, const at::Tensor& tensor, ReduceOp op,
                                      const std::vector<int>& ranks, int place) {
  const int size = static_cast<int>(ranks.size());
  const at::Tensor own = tensor.clone();
  Exchange exchange(link_);
  std::vector<at::Tensor> received(ranks.size());
  std::vector<size_t> tickets;
  std::vector<const void*> contributions(ranks.size(), own.data_ptr());
  for_each_other(place, size, [&](int other) {
    at::Tensor& buffer = received[static_cast<size_t>(other)];
    buffer = at::empty_like(tensor);
    contributions[static_cast<size_t>(other)] = buffer.data_ptr();
    tickets.push_back(
        exchange.recv(buffer, ranks[static_cast<size_t>(other)], call.tag(/*round=*/0)));
  });
  for_each_other(place, size, [&](int other) {
    exchange.send(own, ranks[static_cast<size_t>(other)], call.tag(/*round=*/0));
    sent_.add(call.operation, call.bytes);
  });
  for (const size_t ticket : tickets) exchange.wait_recv(ticket);
  reduce_in_rank_order(contributions, tensor.data_ptr(), tensor.numel(), tensor.scalar_type(), op);
  exchange.wait_sends();
}

void MessageRounds::broadcast(const Call& call, const at::Tensor& tensor,
                              const std::vector<int>& ranks, int place, int root_place) {
  const int size = static_cast<int>(ranks.size());
  const int from_root = (place - root_place + size) % size;
  const auto rank_at = [&](int distance) {
    return ranks[static_cast<size_t>((distance + root_place) % size)];
  };
  Exchange exchange(link_);
  if (from_root != 0) {
    const int parent = rank_at(parent_in_tree(from_root));
    exchange.wait_recv(exchange.recv(tensor, parent, call.tag(/*round=*/0)));
  }
  for_each_child(from_root, size, [&](int child) {
    exchange.send(tensor, rank_at(child), call.tag(/*round=*/0));
    sent_.add(call.operation, call.bytes);
  });
  exchange.wait_sends();
}

void MessageRounds::disseminate(const Call& call, const std::vector<int>& ranks, int place) {
  const int size = static_cast<int>(ranks.size());
  const at::Tensor token = at::zeros({1}, at::kByte);
  const at::Tensor received = at::zeros({1}, at::kByte);
  for_each_round(place, size, [&](int told, int teller, int distance) {
    Exchange exchange(link_);
    const auto round = static_cast<uint64_t>(distance);
    const size_t ticket =
        exchange.recv(received, ranks[static_cast<size_t>(teller)], call.tag(round));
    exchange.send(token, ranks[static_cast<size_t>(told)], call.tag(round));
    sent_.add(call.operation, 0);
    exchange.wait_recv(ticket);
    exchange.wait_sends();
  });
}

}  // namespace zeropage::comm::detail
