#include "all_reduce_shapes/shapes.h"

#include <bit>

namespace all_reduce_shapes {
namespace {

using zeropage::comm::Pending;

constexpr const char* kWhat = "a shape";

at::Tensor like(const Wires& wires, const at::Tensor& tensor) {
  return at::empty({tensor.numel() / wires.size()}, tensor.options());
}

void by_server(Wires& wires, const at::Tensor& tensor) {
  if (wires.rank() != 0) {
    wires.send(tensor, 0);
    wires.receive(tensor, 0);
    return;
  }
  const at::Tensor arrived = at::empty_like(tensor);
  for (int other = 1; other < wires.size(); ++other) {
    wires.receive(arrived, other);
    tensor.add_(arrived);
  }
  for (int other = 1; other < wires.size(); ++other) wires.send(tensor, other);
}

void by_tree(Wires& wires, const at::Tensor& tensor) {
  const int rank = wires.rank();
  const at::Tensor arrived = at::empty_like(tensor);
  int distance = 1;
  for (; distance < wires.size() && rank % (2 * distance) == 0; distance *= 2) {
    if (rank + distance >= wires.size()) continue;
    wires.receive(arrived, rank + distance);
    tensor.add_(arrived);
  }
  if (rank != 0) {
    wires.send(tensor, rank - distance);
    wires.receive(tensor, rank - distance);
  }
  while ((distance /= 2) > 0) {
    if (rank + distance < wires.size()) wires.send(tensor, rank + distance);
  }
}

// A rank's messages take its parity's lane: neighbours differ in it, but for the ends of an odd ring.
void by_ring(Wires& wires, const at::Tensor& tensor) {
  const int rank = wires.rank();
  const int size = wires.size();
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  const int64_t numel = tensor.numel() / size;
  const auto slice = [&](int index) {
    return tensor.narrow(0, (index % size + size) % size * numel, numel);
  };
  const at::Tensor arrived = like(wires, tensor);
  for (int step = 0; step < size - 1; ++step) {
    wires.exchange(slice(rank - step), next, rank % 2, arrived, previous, previous % 2);
    slice(rank - step - 1).add_(arrived);
  }
  for (int step = 0; step < size - 1; ++step) {
    wires.exchange(slice(rank + 1 - step), next, rank % 2, slice(rank - step), previous,
                   previous % 2);
  }
}

void by_halving(Wires& wires, const at::Tensor& tensor) {
  const int rank = wires.rank();
  int64_t first = 0;
  int64_t numel = tensor.numel();
  for (int distance = wires.size() / 2; distance > 0; distance /= 2) {
    const int half = (rank & distance) != 0 ? 1 : 0;  // that this rank keeps
    numel /= 2;
    const at::Tensor arrived = at::empty({numel}, tensor.options());
    wires.exchange(tensor.narrow(0, first + (1 - half) * numel, numel), rank ^ distance, half,
                   arrived, rank ^ distance, 1 - half);
    first += half * numel;
    tensor.narrow(0, first, numel).add_(arrived);
  }
  for (int distance = 1; distance < wires.size(); distance *= 2) {
    const int half = (rank & distance) != 0 ? 1 : 0;
    const int64_t theirs = half == 1 ? first - numel : first + numel;
    wires.exchange(tensor.narrow(0, first, numel), rank ^ distance, half,
                   tensor.narrow(0, theirs, numel), rank ^ distance, 1 - half);
    first = std::min(first, theirs);
    numel *= 2;
  }
}

}  // namespace

bool works_for(Shape shape, int ranks) {
  return shape != Shape::kHalving || std::has_single_bit(static_cast<unsigned>(ranks));
}

void Wires::send(const at::Tensor& tensor, int to) {
  lane(0).communicator().send(tensor, to, kWhat).wait();
}

void Wires::receive(const at::Tensor& tensor, int from) {
  lane(0).communicator().recv(tensor, from, kWhat).wait();
  received_bytes_ += static_cast<int64_t>(tensor.nbytes());
}

void Wires::exchange(const at::Tensor& leaving, int to, int lane_out, const at::Tensor& arriving,
                     int from, int lane_in) {
  const Pending sent = lane(lane_out).communicator().send(leaving, to, kWhat);
  lane(lane_in).communicator().recv(arriving, from, kWhat).wait();
  sent.wait();
  received_bytes_ += static_cast<int64_t>(arriving.nbytes());
}

int64_t Wires::sent_bytes() const {
  return lane(0).communicator().wire_traffic().pair.bytes +
         lane(1).communicator().wire_traffic().pair.bytes;
}

void all_reduce(Shape shape, Wires& wires, const at::Tensor& tensor) {
  switch (shape) {
    case Shape::kServer:
      return by_server(wires, tensor);
    case Shape::kTree:
      return by_tree(wires, tensor);
    case Shape::kRing:
      return by_ring(wires, tensor);
    case Shape::kHalving:
      return by_halving(wires, tensor);
  }
}

}  // namespace all_reduce_shapes
