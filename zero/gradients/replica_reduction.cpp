#include "zero/gradients/replica_reduction.h"

#include <utility>

#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

ReplicaReduction::ReplicaReduction(std::shared_ptr<const ParameterPages> pages)
    : pages_(std::move(pages)), of_pages_(pages_->layouts().size()) {}

void ReplicaReduction::start(size_t page, const at::Tensor& values) {
  OfPage& of_page = of_pages_[page];
  of_page.values = values;
  {
    const memory::KindScope kind(memory::Kind::kBucket);
    of_page.wire = values.to(pages_->plan()[page].reduce_dtype);
  }
  of_page.reduction = pages_->worlds().replicas->communicator().all_reduce(
      of_page.wire, of_page.op,
      "the gradient of " + pages_->describe(page) + " between groups of shards");
  of_page.is_of_group = false;
}

void ReplicaReduction::close(size_t page, const at::Tensor& values, Backwards backwards) {
  if (!pages_->worlds().replicas) return;
  const bool travels_once = !pages_->options().world_invariant;
  if (travels_once && backwards == Backwards::kMoreFollow) {
    of_pages_[page].is_of_group = true;
  } else {
    start(page, values);
  }
}

void ReplicaReduction::reduce(size_t page, const at::Tensor& values) {
  if (!pages_->worlds().replicas) return;
  start(page, values);
  wait(page);
}

void ReplicaReduction::wait(size_t page) {
  OfPage& of_page = of_pages_[page];
  if (!of_page.wire.defined()) return;
  of_page.reduction.wait();
  of_page.reduction = {};
  if (!of_page.wire.is_same(of_page.values)) of_page.values.copy_(of_page.wire);
  of_page.wire.reset();
  of_page.values.reset();
}

void ReplicaReduction::wait() {
  for (size_t page = 0; page < of_pages_.size(); ++page) wait(page);
}

bool ReplicaReduction::complete(size_t page, const at::Tensor& values) {
  if (!of_pages_[page].is_of_group) return false;
  if (!values.defined()) {
    forget(page);
    return false;
  }
  reduce(page, values);
  return true;
}

void ReplicaReduction::check_complete(size_t page) const {
  ZP_CHECK(!of_pages_[page].is_of_group, "p.grad() of ", pages_->describe(page),
           ": in the middle of an accumulation it is a sum over the ", pages_->shards().size(),
           " ranks of a group alone (options.shard_within); read gradients after the last "
           "micro-batch, or leave shard_within out");
}

}  // namespace zeropage::zero
