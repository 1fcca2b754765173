// The watches of one rank: of its world, and of the worlds that were split from it. If one of them fails, the
// others fail for the same cause, because other ranks would wait for this one in vain.
//
// Threads: any. Throws: nothing.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "comm/watch/activity.h"
#include "comm/watch/failure_reason.h"

namespace zeropage::comm::detail {

class WatchGroup {
 public:
  class Member {
   public:
    virtual ~Member() = default;
    virtual Activity& activity() = 0;
    // Another watch of the group has failed for that reason: ends what is under way, and all that follows, for the
    // same cause, and announces it to ranks that wait for this one.
    virtual void fail_with(const FailureReason& account) = 0;
    // Waits until they can know it.
    virtual void wait_until_announced() = 0;
  };

  // First the one of all ranks.
  void add(const std::shared_ptr<Member>& member);
  // The one of all ranks; null: that is `part`, or it is gone.
  std::shared_ptr<Member> world_of(const Member& part) const;
  void end_with(const Member& failed, const FailureReason& account);

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::weak_ptr<Member> world_;
  std::vector<std::weak_ptr<Member>> members_;
};

}  // namespace zeropage::comm::detail
