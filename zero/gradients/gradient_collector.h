// Moves gradients from autograd into their pages' buckets.
//
// On an accelerator a launch costs more than most of the copies: gradients wait with autograd for others
// of their page, up to half a page of them over all pages, and one call copies what has waited. On the
// host each is copied while it is in the cache, unless its bucket cannot be opened yet: of transient
// buckets (zero/gradients/gradient_buckets.h) one is closed before the next is opened.
//
// Lifetime: what it is given outlives it. Threads: the thread that runs backward.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "zero/gradients/page_gradient.h"
#include "zero/gradients/waiting_gradients.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class GradientCollector {
 public:
  // gradients: by page. reducing: the pages whose bucket is being reduced. finish_reductions: blocks until
  // none is, and closes them.
  GradientCollector(const ParameterPages& pages, const TrainingParameters& training,
                    const GradientBuckets& buckets, std::vector<PageGradient>& gradients,
                    const std::deque<size_t>& reducing, std::function<void()> finish_reductions);

  // The parameter's gradient has come, the last of its page or not.
  void add(size_t parameter, bool is_last, Collect collect);
  // All of the page that is not in the bucket yet.
  void collect_page(size_t page, Collect collect);
  // What has waited of the page.
  void collect_waiting(size_t page, Collect collect);
  // Gives the page's bucket memory.
  void open(size_t page, Collect collect);
  // What has waited of the page went with its backward.
  void forget(size_t page) { waiting_.forget(page); }

 private:
  bool may_wait(size_t page) const;
  bool would_block(size_t page) const;
  void collect(size_t page, std::vector<size_t> parameters, Collect collect);

  const ParameterPages& pages_;
  const TrainingParameters& training_;
  const GradientBuckets& buckets_;
  std::vector<PageGradient>& gradients_;
  const std::deque<size_t>& reducing_;
  const std::function<void()> finish_reductions_;
  WaitingGradients waiting_;
};

}  // namespace zeropage::zero
