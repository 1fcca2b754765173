// Ranks as threads of one process, for tests: World::threads(n, function) in comm/world.h.
//
//   zeropage::World::threads(2, [](zeropage::World& world) {
//     EXPECT_EQ(world.sum(1.0), 2.0);
//   });
//
// Each rank has a world, a ledger and LibTorch's intra-op pool to itself. What LibTorch has once a process the
// ranks share: the default generator of random numbers (torch::manual_seed), autocast's cache, and
// autograd's one thread a device; so ranks that share an accelerator cannot be threads.
#pragma once

#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zeropage::comm {

struct ThreadsOptions {
  // LibTorch's intra-op threads of each rank.
  int threads_per_rank = 1;
  // By rank, the name of its host: ranks with equal names are taken to be on one host. Default, none: all are on
  // one.
  std::vector<std::string> hosts = {};
  // Where ranks meet: a store for each rank, or one for all. Default, null: one in memory.
  std::function<c10::intrusive_ptr<c10d::Store>(int rank)> store = {};
};

// A rank threw. what(): "[rank 1/4] " and the message of the first that did, without LibTorch's stack.
class RanksFailed : public std::runtime_error {
 public:
  // errors: by rank, null for a rank that ended well. rank: of the first, which has one.
  RanksFailed(int rank, std::vector<std::exception_ptr> errors);

  // The rank that threw first.
  int rank() const { return rank_; }
  // What each rank threw, by rank; null: nothing. Errors of the others usually say that they lost the first.
  const std::vector<std::exception_ptr>& errors() const { return errors_; }

 private:
  int rank_;
  std::vector<std::exception_ptr> errors_;
};

}  // namespace zeropage::comm
