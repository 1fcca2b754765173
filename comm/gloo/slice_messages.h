// Slices of tensors by messages: to one rank, from one rank, and from each to each.
//
// All ranks of an operation call the same. What is sent is counted.
//
// Lifetime: the link and the counter must outlive it. Threads: the one that performs the operations.
// Throws: PeerError.
#pragma once

#include <vector>

#include "comm/detail/call.h"
#include "comm/gloo/gloo_link.h"

namespace zeropage::comm::detail {

class SliceMessages {
 public:
  // far: the ranks that this one reaches by messages, in the order in which it turns to them.
  SliceMessages(GlooLink& link, TrafficCounter& sent, int rank, std::vector<int> far)
      : link_(link), sent_(sent), rank_(rank), far_(std::move(far)) {}

  // own: this rank's slice. whole: the root's, who gets those of all that are far from it; unused on others.
  void gather(const Call& call, const at::Tensor& own, const at::Tensor& whole,
              const Slices& slices, int root);
  // The reverse.
  void scatter(const Call& call, const at::Tensor& own, const at::Tensor& whole,
               const Slices& slices, int root);
  // This rank's slice of what each far rank gives.
  void exchange(const Call& call, const at::Tensor& given, const at::Tensor& received,
                const Slices& slices);

 private:
  bool is_far(int other) const;
  void send(GlooLink::Exchange& exchange, const Call& call, const at::Tensor& slice, int to);

  GlooLink& link_;
  TrafficCounter& sent_;
  const int rank_;
  const std::vector<int> far_;
};

}  // namespace zeropage::comm::detail
