// The second half of a reduction if several groups of ranks each have all pages (zero/pages/page_worlds.h): it
// makes the result of a group the mean or the sum over all ranks, among the ranks that have the same shard.
//
// The micro-steps of an accumulation are added up within groups, and travel between them once a step. In the tree
// order of Options::world_invariant each of them travels.
//
// Without other groups it does nothing.
//
// Threads: the thread that runs backward. Collective over this rank's replicas: close, complete.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/gradients/backward_plan.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {

class ReplicaReduction {
 public:
  explicit ReplicaReduction(std::shared_ptr<const ParameterPages> pages);

  // A backward reduces the page over the group by this operation.
  void begin(size_t page, comm::ReduceOp op) { of_pages_[page].op = op; }
  // Whether what is kept of the page is reduced over the group alone. What is kept else is what all ranks have, and does not
  // travel again, which would round it: what is added to it is reduced by itself, before.
  bool is_of_group(size_t page) const { return of_pages_[page].is_of_group; }
  // values: [owned numel], what is reduced over the group so far. Starts to make of it what all ranks have, in place,
  // unless further backwards follow that are added to it.
  void close(size_t page, const at::Tensor& values, Backwards backwards);
  // Like close(), for one backward alone, before anything is added to it; has ended when it returns.
  void reduce(size_t page, const at::Tensor& values);
  // Waits until what close() started has ended.
  void wait(size_t page);
  void wait();
  // Makes up for the backwards that did not follow; whether values changed. values: undefined where they were
  // zeroed, on all ranks alike.
  bool complete(size_t page, const at::Tensor& values);
  // Forgets what is kept of the page.
  void forget(size_t page) { of_pages_[page].is_of_group = false; }

  // Throws if the page has what only its group has reduced so far, in the middle of an accumulation.
  void check_complete(size_t page) const;

 private:
  struct OfPage {
    comm::ReduceOp op = comm::ReduceOp::kMean;
    bool is_of_group = false;  // values are reduced over the group alone
    at::Tensor values;         // defined while they are reduced
    at::Tensor wire;           // the same; what travels
    comm::Pending reduction;
  };

  void start(size_t page, const at::Tensor& values);

  const std::shared_ptr<const ParameterPages> pages_;
  std::vector<OfPage> of_pages_;
};

}  // namespace zeropage::zero
