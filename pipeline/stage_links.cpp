#include "pipeline/stage_links.h"

#include <ATen/ATen.h>

#include "zeropage/ledger.h"

namespace zeropage::pipeline {
namespace {

// Neighbours that meet in one split: no rank is in two of them. edge: between rank `edge` and the next one.
int group_of(int edge, int ranks) {
  const bool closes_odd_ring = edge == ranks - 1 && ranks % 2 == 1;
  return closes_odd_ring ? 2 : edge % 2;
}

}  // namespace

StageLinks::StageLinks(const comm::World& ranks, int chunks) : ranks_(ranks) {
  const int size = ranks_.size();
  if (size == 1 || ranks_.device().is_meta()) return;
  const int edges = chunks > 1 ? size : size - 1;
  for (const Message::What what : {Message::What::kActivation, Message::What::kGradient}) {
    for (int group = 0; group < 3; ++group) {
      int own = -1;
      bool any = false;
      for (int edge = 0; edge < edges; ++edge) {
        if (group_of(edge, size) != group) continue;
        any = true;
        if (ranks_.rank() == edge || ranks_.rank() == (edge + 1) % size) own = edge;
      }
      if (any) join(own, what);
    }
  }
}

// edge: -1 where this rank is in none of those that meet now.
void StageLinks::join(int edge, Message::What what) {
  const int color = edge >= 0 ? edge : ranks_.size() + ranks_.rank();
  // The lower one of the edge first, also where the last rank meets the first.
  const int key = edge == ranks_.rank() ? 0 : 1;
  comm::World link = ranks_.split(color, key);
  if (edge >= 0) links_.emplace(Direction{what, edge}, std::move(link));
}

bool StageLinks::is_local(const Message& message) const {
  return rank_of(message.sending_stage()) == rank_of(message.receiving_stage());
}

StageLinks::Direction StageLinks::direction_of(const Message& message) const {
  return {message.what, rank_of(message.boundary)};
}

StageLinks::End StageLinks::end_of(const Message& message) const {
  const bool sends = rank_of(message.sending_stage()) == ranks_.rank();
  if (ranks_.device().is_meta()) {
    const int other = sends ? message.receiving_stage() : message.sending_stage();
    return {&ranks_.communicator(), rank_of(other)};
  }
  const comm::World& link = links_.at(direction_of(message));
  return {&link.communicator(), 1 - link.rank()};
}

void StageLinks::send(const Message& message, const at::Tensor& tensor, const std::string& what) {
  while (!sent_.empty() && sent_.front().pending.done()) {
    sent_.front().pending.wait();  // rethrows
    sent_.pop_front();
  }
  const End end = end_of(message);
  const at::Tensor flat = tensor.detach().contiguous().view({-1});
  sent_.push_back({end.link->send(flat, end.other, what), flat});
}

StageLinks::Arriving StageLinks::receive(const Message& message, at::IntArrayRef sizes,
                                         at::ScalarType dtype, const std::string& what) {
  const End end = end_of(message);
  at::Tensor tensor;
  {
    const memory::KindScope kind(memory::Kind::kActivation);
    tensor = at::empty(sizes, at::TensorOptions().dtype(dtype).device(ranks_.device()));
  }
  return {tensor, end.link->recv(tensor.view({-1}), end.other, what)};
}

void StageLinks::wait_for_sent() {
  while (!sent_.empty()) {
    sent_.front().pending.wait();
    sent_.pop_front();
  }
}

comm::Traffic StageLinks::sent() const {
  if (ranks_.size() == 1) return {};
  if (ranks_.device().is_meta()) return ranks_.communicator().wire_traffic().pair;
  comm::Traffic sum;
  for (const auto& [direction, link] : links_) {
    const comm::Traffic pair = link.communicator().wire_traffic().pair;
    sum.bytes += pair.bytes;
    sum.messages += pair.messages;
  }
  return sum;
}

}  // namespace zeropage::pipeline
