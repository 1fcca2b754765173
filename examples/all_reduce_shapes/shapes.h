// Four ways to add a tensor over all ranks, written with messages between pairs.
//
//   server    every rank sends to rank 0, which adds and sends back (a parameter server)
//   tree      pairs add towards rank 0 along a binomial tree, and the sum goes back along it
//   ring      each rank passes a slice on to its right neighbour, N - 1 times to add and N - 1 times to gather
//             (Patarasu, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations")
//   halving   partners exchange halves, then quarters ..., and gather in reverse
//             (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH")
#pragma once

#include <array>
#include <cstdint>

#include <zeropage/zeropage.h>

namespace all_reduce_shapes {

enum class Shape : uint8_t { kServer, kTree, kRing, kHalving };
inline constexpr std::array<Shape, 4> kShapes = {Shape::kServer, Shape::kTree, Shape::kRing,
                                                 Shape::kHalving};

constexpr const char* name(Shape shape) {
  constexpr std::array<const char*, 4> kNames = {"server", "tree", "ring", "halving"};
  return kNames[static_cast<size_t>(shape)];
}

// Halving needs a power of two.
bool works_for(Shape shape, int ranks);

// Between the ranks of a world. Operations of a communicator run one after the other, so that messages in both
// directions take two.
class Wires {
 public:
  // Collective.
  explicit Wires(const zeropage::World& world)
      : lanes_{world.split(/*color=*/0, /*key=*/0), world.split(/*color=*/0, /*key=*/0)} {}

  int rank() const { return lanes_[0].rank(); }
  int size() const { return lanes_[0].size(); }
  const zeropage::World& lane(int index) const { return lanes_[static_cast<size_t>(index)]; }

  void send(const at::Tensor& tensor, int to);
  void receive(const at::Tensor& tensor, int from);
  // At the same time. The lanes: of the message that leaves, and of the one that arrives.
  void exchange(const at::Tensor& leaving, int to, int lane_out, const at::Tensor& arriving,
                int from, int lane_in);

  int64_t sent_bytes() const;  // so far
  int64_t received_bytes() const { return received_bytes_; }

 private:
  std::array<zeropage::World, 2> lanes_;
  int64_t received_bytes_ = 0;
};

// tensor: [numel]; numel divides by the number of ranks. Collective.
void all_reduce(Shape shape, Wires& wires, const at::Tensor& tensor);

}  // namespace all_reduce_shapes
