// Adds up what the micro-steps of one optimizer step bring for a flat tensor.
//
//   sums.push(owned);    // before the next micro-step overwrites it
//   sums.add_to(owned);  // after the last one: now the sum of all
//
// kRunning: ((0 1) 2) 3 ..., one tensor set aside.
// kTree: the pairwise tree over micro-steps, ((0 1)(2 3)) ..., as a binary counter whose digit l is
// the sum of 2^l of them. With comm/'s tree over ranks below it, it is one tree over all
// micro-batches, numbered micro-step times ranks plus rank; so a power of two of ranks can be
// exchanged for micro-steps without changing a bit. Sets aside floor(log2(pushed)) + 1 tensors at
// most.
//
// Threads: one at a time. On an accelerator the sums are queued to the current stream.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/options.h"

namespace zeropage::zero {

enum class SumOrder : uint8_t { kRunning, kTree };

// kTree where Options::world_invariant promises the same bits for each split.
SumOrder sum_order_of(const Options& options);

class MicroStepSums {
 public:
  explicit MicroStepSums(SumOrder order) : order_(order) {}

  SumOrder order() const { return order_; }
  bool empty() const;
  // term: [numel], the same for all; may change afterwards. What is set aside is of the calling
  // thread's memory kind.
  void push(const at::Tensor& term);
  // In place of all that was pushed, and of one term more, zeros: they take no memory, but keep the
  // places of the terms after them in the tree.
  void skip();
  // Adds what was pushed to the last term, in place, and forgets it.
  void add_to(const at::Tensor& last);
  // Elements [begin, begin + numel) of what was pushed become zero.
  void zero(int64_t begin, int64_t numel);
  void clear();

 private:
  SumOrder order_;
  std::vector<at::Tensor> partial_sums_;  // by digit; undefined where the digit or the sum is 0
  uint64_t pushed_ = 0;
};

}  // namespace zeropage::zero
