// Random numbers that differ between the ranks of a group that otherwise draws alike.
//
//   torch::manual_seed(seed_of(data.rank()));     // alike on the ranks of `tensor`, other data ranks differ
//   x = torch::dropout(x, 0.1, true);             // whole on all ranks: the same mask
//   {
//     const parallel::RandomOfRank own(tensor);
//     y = torch::dropout(slice, 0.1, true);       // a slice on each rank: masks of their own
//   }
//
// Ranks of a tensor-parallel group begin with one seed, since a dropout of what all of them hold must be the
// same on all. In this scope the default generators continue from a number that was drawn before, mixed with the
// rank. After it they continue as if that number alone had been drawn. So the ranks still draw alike after
// it, a saved state has nothing more, and a checkpointed region that contains the scope repeats its numbers.
//
// Generators: LibTorch's defaults of the host and of the world's device, on which nothing is waited for.
// Cost: microseconds, and two copies of the host generator's state of 5 KB.
// Threads: as LibTorch's default generators, which are the process's: not for ranks that are threads of one.
#pragma once

#include <vector>

#include <ATen/core/Generator.h>

#include "comm/world.h"

namespace zeropage::parallel {

class RandomOfRank {
 public:
  explicit RandomOfRank(const comm::World& world);
  ~RandomOfRank();
  RandomOfRank(const RandomOfRank&) = delete;
  RandomOfRank& operator=(const RandomOfRank&) = delete;

 private:
  struct Outside {
    at::Generator generator;
    at::Generator state;
  };
  std::vector<Outside> outside_;
};

}  // namespace zeropage::parallel
