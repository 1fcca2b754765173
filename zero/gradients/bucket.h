// A page's bucket, in which this rank's gradients of the page are collected: where each lies, what lies between them, and
// which are not there yet.
//
// Threads: the thread that runs backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/gradients/backward_plan.h"
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/hooks.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/detail/range.h"

namespace zeropage::zero {

// Where in the page's bucket no parameter that trains lies. What is there is reduced with the rest, and stepped over by
// the optimizer, so it has to be zero.
// parameters: those of the page that train. Ascending, to the end of the padding; one that has gaps itself is
// one of them as a whole.
std::vector<Range> gaps_between(const ParameterPages& pages, size_t page,
                                const std::vector<size_t>& parameters);

// Zeros there. bucket: [padded_numel].
void zero_gaps(const at::Tensor& bucket, const std::vector<Range>& gaps);

// The places of a page's gradients in its bucket, shaped as the parameters. p.grad() is moved there.
//
// They are open from the first gradient of a backward to its end, or until the reduction starts, if that takes over
// the bucket's memory. Between backwards p.grad() alone owns the memory.
//
// Lifetime: the parameters and the buckets outlive it.
class GradientSlots {
 public:
  struct Slot {
    size_t parameter = 0;
    at::Tensor view;       // undefined while the bucket is closed
    bool is_kept = false;  // something is kept that is added to the parameter's next gradient
    // Version of the view when p.grad() began to stand for the kept sum too; kUnseen where it does not.
    static constexpr int64_t kUnseen = -1;
    int64_t seen_version = kUnseen;
  };

  GradientSlots(size_t page, const TrainingParameters& training, GradientBuckets& buckets);

  // After parameters of the page have begun to train, between two backwards.
  void begin_training();

  // Slots of the page's parameters that train, ascending.
  std::vector<Slot>& all() { return slots_; }
  const std::vector<Slot>& all() const { return slots_; }
  Slot& of(size_t parameter);

  bool are_open() const { return !slots_.empty() && slots_.front().view.defined(); }
  // Opens them in the bucket that an earlier backward left, if the p.grad() of one is there still; else in a new
  // bucket.
  void open(Collect collect);
  // Opens them in the bucket that an earlier backward left, if any, wherever p.grad() is.
  void reopen();
  // The same, if the p.grad() of one is in that bucket.
  void reopen_if_used();
  // Closes them; p.grad() is undefined afterwards.
  void close();
  // From here on p.grad() alone owns the page's gradient.
  void let_go();

  // Those of the parameters whose gradient is not in its slot. Throws where one is sparse.
  std::vector<size_t> outside(std::vector<size_t> parameters);
  // Moves their gradients there. REQUIRES: are_open().
  void collect(const std::vector<size_t>& parameters);
  // Makes their slots zero, in one call. REQUIRES: are_open().
  void zero(const std::vector<size_t>& parameters);

 private:
  void place(const at::Tensor& bucket);
  bool any_in(const at::Tensor& bucket) const;

  // Constant after construction.
  const size_t page_;
  const TrainingParameters& training_;
  GradientBuckets& buckets_;

  std::vector<Slot> slots_;
  at::Tensor bucket_;  // that they lie in; undefined while it is closed
};

// Which gradients of all pages are with autograd still, not yet in their pages' buckets.
class WaitingGradients {
 public:
  explicit WaitingGradients(size_t pages) : of_page_(pages) {}

  void add(size_t page, size_t parameter, int64_t numel) {
    pages_.insert(page);
    of_page_[page].parameters.push_back(parameter);
    of_page_[page].numel += numel;
    numel_ += numel;
  }
  void forget(size_t page) {
    numel_ -= of_page_[page].numel;
    of_page_[page] = {};
    pages_.erase(page);
  }

  const std::vector<size_t>& of(size_t page) const { return of_page_[page].parameters; }
  // Pages of which some wait, the last of the module first.
  std::vector<size_t> pages() const { return {pages_.begin(), pages_.end()}; }
  // Number of elements that wait, over all pages.
  int64_t numel() const { return numel_; }

 private:
  struct OfPage {
    std::vector<size_t> parameters;
    int64_t numel = 0;
  };
  std::vector<OfPage> of_page_;
  std::set<size_t, std::greater<>> pages_;
  int64_t numel_ = 0;
};

}  // namespace zeropage::zero
