#include "comm/detail/kin.h"

#include <utility>

namespace zeropage::comm::detail {

void Kin::add(const std::shared_ptr<Member>& member) {
  const std::lock_guard lock(mutex_);
  if (members_.empty()) world_ = member;
  std::erase_if(members_, [](const auto& known) { return known.expired(); });
  members_.push_back(member);
}

std::shared_ptr<Kin::Member> Kin::world_of(const Member& part) const {
  const std::lock_guard lock(mutex_);
  auto world = world_.lock();
  return world.get() == &part ? nullptr : world;
}

void Kin::end_with(const Member& failed, const Account& account) {
  std::vector<std::shared_ptr<Member>> others;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : members_) {
      if (auto member = known.lock(); member && member.get() != &failed) {
        others.push_back(std::move(member));
      }
    }
  }
  for (const auto& other : others) other->condemn(account);
  for (const auto& other : others) other->wait_until_told();
}

}  // namespace zeropage::comm::detail
