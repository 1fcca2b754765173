// Where regions and recomputed operators write down what they cost.
//
// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "zeropage/recompute.h"

namespace zeropage::checkpointing::detail {

class RecomputeAccount {
 public:
  // The account of the calling thread.
  static const std::shared_ptr<RecomputeAccount>& of_this_thread();

  void add_forward(double flops);
  void add_replay(double flops, double seconds);
  RecomputeStatistics statistics() const;

 private:
  mutable std::mutex mutex_;
  RecomputeStatistics statistics_;
};

// The accounts that one forward is charged to: its thread's, and the one of its Recompute.
class ForwardAccount {
 public:
  // On the forward's thread.
  explicit ForwardAccount(std::shared_ptr<RecomputeAccount> own) : own_(std::move(own)) {}

  void add_forward(double flops) {
    of_thread_->add_forward(flops);
    own_->add_forward(flops);
  }
  void add_replay(double flops, double seconds) {
    of_thread_->add_replay(flops, seconds);
    own_->add_replay(flops, seconds);
  }

 private:
  const std::shared_ptr<RecomputeAccount> of_thread_ = RecomputeAccount::of_this_thread();
  const std::shared_ptr<RecomputeAccount> own_;
};

}  // namespace zeropage::checkpointing::detail
