// Brings dropped values back, by running their operators again.
//
// Threads: the tape that records guards it.
// Throws: c10::Error, where what an operator reads was changed in place since the forward, or where
// it does otherwise than then; what the operator throws.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "checkpointing/detail/recompute_account.h"
#include "checkpointing/detail/recorded_forward.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::detail {

class ValueReplay {
 public:
  // account: outlives it.
  explicit ValueReplay(ForwardAccount& account) : account_(account) {}

  // Gives the value memory, kRecompute of the ledger of the forward. REQUIRES: it has none.
  // drop_again_later: to call at the end of a backward that keeps its graph.
  void bring_back(const std::shared_ptr<Value>& value,
                  const std::function<void()>& drop_again_later);
  // What came back for a backward that keeps its graph goes.
  void drop_again();

 private:
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();
  ForwardAccount& account_;
  std::vector<std::weak_ptr<Value>> brought_back_;  // with a graph that is retained
  int drops_again_after_ = -1;                      // the backward
};

}  // namespace zeropage::checkpointing::detail
