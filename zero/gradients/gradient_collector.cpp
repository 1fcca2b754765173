#include "zero/gradients/gradient_collector.h"

#include <algorithm>
#include <utility>

#include "device/stream.h"

namespace zeropage::zero {

GradientCollector::GradientCollector(const ParameterPages& pages,
                                     const TrainingParameters& training,
                                     const GradientBuckets& buckets,
                                     std::vector<PageGradient>& gradients,
                                     const std::deque<size_t>& reducing,
                                     std::function<void()> finish_reductions)
    : pages_(pages),
      training_(training),
      buckets_(buckets),
      gradients_(gradients),
      reducing_(reducing),
      finish_reductions_(std::move(finish_reductions)),
      waiting_(gradients.size()) {}

void GradientCollector::add(size_t parameter, bool is_last, Collect how) {
  const size_t page = training_.placed(parameter).page;
  if (!gradients_[page].slots().outside({parameter}).empty()) {
    waiting_.add(page, parameter, training_.gradient(parameter).numel());
  }
  if (!is_last && may_wait(page)) return;
  collect_waiting(page, how);
  // Other pages' too, if their buckets have memory: what waits longer would leave less room.
  for (const size_t other : waiting_.pages()) {
    if (gradients_[other].slots().are_open()) collect_waiting(other, how);
  }
}

// Half a page over all pages: a model of which every page misses a gradient holds no more.
bool GradientCollector::may_wait(size_t page) const {
  const bool has_launches = device::has_streams(pages_.world().communicator().device().type());
  if (!has_launches && !would_block(page)) return false;
  return 2 * waiting_.numel() <= pages_.layouts()[page].numel;
}

bool GradientCollector::would_block(size_t page) const {
  if (!buckets_.are_transient() || gradients_[page].slots().are_open()) return false;
  // Where closing a bucket calls the ranks of other groups, it comes at the same point on all: ranks that wait for
  // each other in the operations of two communicators in another order would wait for ever.
  const bool is_collective = pages_.worlds().replicas.has_value();
  return std::any_of(reducing_.begin(), reducing_.end(),
                     [&](size_t other) { return is_collective || !gradients_[other].has_ended(); });
}

// The reduction of the page before has had all of this page's backward so far to end in.
void GradientCollector::open(size_t page, Collect how) {
  if (gradients_[page].slots().are_open()) return;
  if (buckets_.are_transient()) finish_reductions_();
  gradients_[page].slots().open(how);
}

void GradientCollector::collect(size_t page, std::vector<size_t> parameters, Collect how) {
  waiting_.forget(page);
  gradients_[page].slots().reopen_if_used();
  parameters = gradients_[page].slots().outside(std::move(parameters));
  if (parameters.empty()) return;
  open(page, how);
  gradients_[page].slots().collect(parameters);
}

void GradientCollector::collect_page(size_t page, Collect how) {
  collect(page, training_.of_page(page), how);
}

void GradientCollector::collect_waiting(size_t page, Collect how) {
  collect(page, waiting_.of(page), how);
}

}  // namespace zeropage::zero
