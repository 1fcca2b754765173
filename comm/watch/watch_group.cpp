#include "comm/watch/watch_group.h"

#include <utility>

namespace zeropage::comm::detail {

void WatchGroup::add(const std::shared_ptr<Member>& member) {
  const std::lock_guard lock(mutex_);
  if (members_.empty()) world_ = member;
  std::erase_if(members_, [](const auto& known) { return known.expired(); });
  members_.push_back(member);
}

std::shared_ptr<WatchGroup::Member> WatchGroup::world_of(const Member& part) const {
  const std::lock_guard lock(mutex_);
  auto world = world_.lock();
  return world.get() == &part ? nullptr : world;
}

void WatchGroup::end_with(const Member& failed, const FailureReason& account) {
  std::vector<std::shared_ptr<Member>> others;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : members_) {
      if (auto member = known.lock(); member && member.get() != &failed) {
        others.push_back(std::move(member));
      }
    }
  }
  for (const auto& other : others) other->fail_with(account);
  for (const auto& other : others) other->wait_until_announced();
}

}  // namespace zeropage::comm::detail
