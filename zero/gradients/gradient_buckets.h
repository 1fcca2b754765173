// Keeps the gradients of a rank's pages, and reduces them over the ranks.
//
// A page's bucket holds this rank's gradient of the page, at the offsets of the parameters, while it
// collects. The reduction makes the mean or the sum over ranks, as far as this rank needs it to update what it
// owns. A reduced gradient is kept across later buckets until it is forgotten.
//
//   open(page) -> start_reduction(page) -> close(page) -> let_go(page)    once or, with keep(), several times
//   complete(page)                                                        before a step
//
// Memory: from open() to let_go() the gradient is owned here, and then by p.grad() alone
// (zero/gradients/gradient_memory.h). So between zero_grad() and the first gradient of the next backward a page's
// gradient has none. A sum that is kept for the next gradient is owned here, and so is memory on the host.
//
// Kept gradients have the page's gradient_dtype; gradients on the wire have its reduce_dtype.
//
// Threads: the thread that runs backward.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "operators/tensor_mark.h"
#include "paging/pins.h"
#include "zero/gradients/backward_plan.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/communicator.h"
#include "zeropage/options.h"

namespace zeropage::zero {

// What p.grad() is once its page is reduced, until it is zeroed. It keeps the memory of the page's gradient
// (zero/gradients/gradient_memory.h).
//
// Threads: as operators; of() and replaced() the training thread, or the one that runs backward.
class ReducedGradients {
 public:
  virtual ~ReducedGradients() = default;
  ReducedGradients(const ReducedGradients&) = delete;
  ReducedGradients& operator=(const ReducedGradients&) = delete;

  // Whether the tensor is what of() gave since the page's gradient got its memory.
  virtual bool is(size_t parameter, const at::Tensor& gradient) const = 0;
  // Shaped as the parameter. REQUIRES: the page's gradient has memory.
  virtual at::Tensor of(size_t parameter) = 0;
  // The same with the values of `gradient`, another tensor by which the user replaced p.grad() after the
  // reduction. Throws where that cannot be honoured.
  virtual at::Tensor replaced(size_t parameter, const at::Tensor& gradient) = 0;

  // Called with an operator's name before it takes what is p.grad() now, and before those are gathered, until it is
  // another call; empty: nobody. A call may change the gradients.
  using BeforeUse = operators::TensorMark::BeforeUse;
  virtual void set_before_use(BeforeUse call) = 0;

  // The same beside it, where other ranks have parts of them; it changes no gradient.
  virtual void set_on_use(BeforeUse /*call*/) {}

  // Makes p.grad() of these parameters whole for as long as `pins` lives. Collective.
  virtual void gather(const std::vector<size_t>& /*parameters*/, paging::Pins& /*pins*/) {}
  // What was written to them is in the reduced gradient. Throws if one is in use. who: "step()".
  virtual void release(const char* /*who*/) {}
  // Lets go of what was gathered of a page whose gradients have all been zeroed, unless it is in use.
  virtual void release_zeroed(size_t /*page*/) {}

 protected:
  ReducedGradients() = default;
};

// A strategy: which part of the gradients a rank keeps. zero/setup/choose_gradients.h makes the one of the byte plan.
class GradientBuckets {
 public:
  virtual ~GradientBuckets() = default;
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // The page's parameters that have gradients from here on, those before included. Makes what it needs
  // for the page, once.
  virtual void begin_training(size_t page, const std::vector<size_t>& parameters) = 0;

  // A new bucket, zero in the gaps between parameters. [padded_numel]
  virtual at::Tensor open(size_t page, Collect collect) = 0;
  // The bucket that an earlier backward opened, if p.grad() keeps it and it was not closed; else undefined.
  virtual at::Tensor reopen(size_t page) = 0;
  // The backward has ended, and p.grad() is what it leaves of the page.
  virtual void let_go(size_t page) = 0;
  // Whether a bucket's memory goes in close(), so that each should be closed before the next is opened.
  virtual bool are_transient() const = 0;
  // op: kMean or kSum.
  virtual comm::Pending start_reduction(size_t page, comm::ReduceOp op) = 0;
  // REQUIRES: the reduction has ended. Adds what was kept, unless that waits for complete().
  virtual void close(size_t page, Backwards backwards) = 0;
  // Waits until owned() has the reductions over all ranks that were closed, as it has after note_reduced().
  virtual void wait_closed(size_t /*page*/) {}
  // REQUIRES: changes are taken over. Makes owned() the sum of all that was kept; whether that changed it.
  virtual bool complete(size_t page) = 0;

  // The reduced gradient of what this rank owns of the page, once closed; undefined where no p.grad() keeps it.
  // [owned numel], gradient_dtype
  virtual at::Tensor owned(size_t page) const = 0;
  // Whether it is in the host tier.
  virtual bool is_offloaded(size_t /*page*/) const { return false; }
  // Before somebody writes to owned(page).
  virtual void before_write(size_t /*page*/) const {}
  // It has what was closed when this has ended.
  virtual memory::Pending arrival(size_t /*page*/) const { return {}; }
  // What p.grad() is once its page is closed.
  virtual ReducedGradients& reduced() = 0;

  // Before the page's next bucket is opened: what was reduced is added to the next, but for the
  // given ranges of the page. REQUIRES: owned(page) is defined.
  virtual void keep(size_t page, const std::vector<Range>& forgotten) = 0;
  // Forgets the reduced gradient: it is not added to the next one.
  virtual void forget(size_t page) = 0;
  // The same, and zeros are kept: the next is one of several that are summed, at its place.
  virtual void skip(size_t page) = 0;
  // Does what forget(page) does for a range of a page that is kept.
  virtual void forget(size_t page, const Range& range) = 0;

  // After the reduction of all pages, and before a step, which takes over what was written to p.grad().
  virtual void note_reduced() {}

 protected:
  GradientBuckets() = default;
};

}  // namespace zeropage::zero
