// The watches of one rank: of its world, and of the worlds that were split from it. Where one of them fails
// the others fail for the same cause, since who waits for this rank elsewhere would wait in vain.
//
// Threads: any. Throws: nothing.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "comm/detail/watch.h"

namespace zeropage::comm::detail {

class Kin {
 public:
  void add(const std::shared_ptr<Watch>& watch);
  void end_with(const Watch& failed, const Account& account);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Watch>> watches_;  // guarded by mutex_
};

}  // namespace zeropage::comm::detail
