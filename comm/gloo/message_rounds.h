// Whole tensors by messages, to ranks that the caller lists: all of them, or one of each host.
//
// Every listed rank calls the same with the same list; `place` is its place there. What is sent is
// counted.
//
// Lifetime: the link and the counter must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include <vector>

#include "comm/detail/call.h"
#include "comm/gloo/gloo_link.h"
#include "zeropage/communicator.h"

namespace zeropage::comm::detail {

class MessageRounds {
 public:
  MessageRounds(GlooLink& link, TrafficCounter& sent) : link_(link), sent_(sent) {}

  // Everybody's tensor to everybody, who each reduce it: all_reduce in one round.
  void reduce_everywhere(const Call& call, const at::Tensor& tensor, ReduceOp op,
                         const std::vector<int>& ranks, int place);
  // Along a binomial tree over places counted from the root's: a rank receives once, then feeds ever
  // nearer ranks.
  void broadcast(const Call& call, const at::Tensor& tensor, const std::vector<int>& ranks,
                 int place, int root_place);
  // Returns when all have called it.
  void disseminate(const Call& call, const std::vector<int>& ranks, int place);

 private:
  GlooLink& link_;
  TrafficCounter& sent_;
};

}  // namespace zeropage::comm::detail
