// Where regions write down what they cost.
//
// Threads: a forward thread has one account, which its regions hold; any thread adds.
#pragma once

#include <memory>
#include <mutex>

#include "checkpointing/recompute_statistics.h"

namespace zeropage::checkpointing::detail {

class RecomputeAccount {
 public:
  // Of the calling thread.
  static const std::shared_ptr<RecomputeAccount>& of_this_thread();

  void add_forward(double flops);
  void add_replay(double flops, double seconds);
  RecomputeStatistics statistics() const;

 private:
  mutable std::mutex mutex_;
  RecomputeStatistics statistics_;
};

}  // namespace zeropage::checkpointing::detail
