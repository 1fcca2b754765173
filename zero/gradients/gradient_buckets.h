// Where a rank keeps the gradients of its pages, and how those of the ranks become one.
//
// A page's bucket holds this rank's gradient of the page, at the offsets of the parameters, while it
// collects. The reduction makes of it the mean or the sum over ranks, wherever this rank needs that
// to update what it owns. What was reduced is kept across later buckets until it is forgotten.
//
//   open(page) -> start_reduction(page) -> close(page)    once or, with keep(), several times
//   complete(page)                                        before a step
//
// What is kept is of the gradient_dtype of the page's plan, what travels of its reduce_dtype.
//
// Threads: the thread that runs backward.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "comm/communicator.h"
#include "paging/pins.h"
#include "zero/gradients/backward_plan.h"
#include "zero/options.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage {

class GradientBuckets {
 public:
  virtual ~GradientBuckets() = default;
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // The page's parameters that have gradients from here on, those before included. Makes what it needs
  // for the page, once.
  virtual void begin_training(size_t page, const std::vector<size_t>& parameters) = 0;

  // The bucket, zero in the gaps between parameters. [padded_numel]
  virtual const at::Tensor& open(size_t page, Collect collect) = 0;
  // Whether buckets have memory only from open() to close(), so that each should be closed before
  // the next is opened.
  virtual bool are_transient() const = 0;
  // op: kMean or kSum.
  virtual comm::Pending start_reduction(size_t page, comm::ReduceOp op) = 0;
  // REQUIRES: the reduction has ended. Adds what was kept, unless that waits for complete().
  virtual void close(size_t page, Backwards backwards) = 0;
  // REQUIRES: changes are taken over. Makes owned() the sum of all that was kept; whether that changed it.
  virtual bool complete(size_t page) = 0;

  // The reduced gradient of what this rank owns of the page, once closed. Always the same memory.
  // [owned numel], gradient_dtype
  virtual const at::Tensor& owned(size_t page) const = 0;
  // Whether it is in the host tier.
  virtual bool is_offloaded(size_t /*page*/) const { return false; }
  // It has what was closed when this has ended.
  virtual memory::Pending arrival(size_t /*page*/) const { return {}; }
  // What p.grad() is once its page is closed; shaped as the parameter.
  virtual const at::Tensor& reduced_gradient(size_t parameter) const = 0;

  // Before the page's next bucket is opened: what was reduced is added to the next, but for the
  // given ranges of the page.
  virtual void keep(size_t page, const std::vector<Range>& forgotten) = 0;
  // Nothing of what was reduced is added to the next.
  virtual void forget(size_t page) = 0;
  // The same, and zeros are kept: the next is one of several that are summed, at its place.
  virtual void skip(size_t page) = 0;
  // As forget(page) for a range of a page that is kept.
  virtual void forget(size_t page, const Range& range) = 0;

  // Before a step, for a parameter whose p.grad() the user replaced by another tensor after the
  // reduction. Throws where that cannot be honoured.
  virtual void replace(size_t parameter, const at::Tensor& gradient) = 0;
  // Makes p.grad() of these parameters whole for as long as `pins` lives. Collective.
  virtual void gather(const std::vector<size_t>& parameters, memory::Pins& pins) = 0;

  // After the reduction of all pages, and before a step, which takes over what was written to p.grad().
  virtual void note_reduced() {}
  virtual void take_over_changes() {}

 protected:
  GradientBuckets() = default;
};

}  // namespace zeropage
