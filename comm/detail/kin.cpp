#include "comm/detail/kin.h"

#include <numeric>
#include <utility>

#include "comm/detail/store_calls.h"

namespace zeropage::comm::detail {

void Kin::add(const std::shared_ptr<Watch>& watch) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watches_, [](const auto& known) { return known.expired(); });
  watches_.push_back(watch);
}

void Kin::end_with(const Watch& failed, const Account& account) {
  std::vector<std::shared_ptr<Watch>> others;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : watches_) {
      if (auto watch = known.lock(); watch && watch.get() != &failed) {
        others.push_back(std::move(watch));
      }
    }
  }
  for (const auto& other : others) other->condemn(account);
  for (const auto& other : others) other->wait_until_told();
}

// ---- the watch's part in it ----

void Watch::tell_kin(const Account& account) {
  if (options_.kin) options_.kin->end_with(*this, account);
}

void Watch::condemn(const Account& account) {
  const std::lock_guard in_turn(condemning_);
  Standing ours;
  {
    const std::lock_guard lock(mutex_);
    if (has_failed_ || verdict_ || stopping_) return;
    condemned_ = account;
    has_failed_ = true;
    verdict_ = Verdict{Verdict::Kind::kFailed, options_.rank,
                       c10::str(account.cause, ". This rank had failed of it",
                                account.call.empty() ? "" : " in " + account.call)};
    ours = own_standing();
    if (!running_) return;
  }
  ask([store = store_, key = own_key(), ours] {
    if (is_served(store)) write_key(*store, key, ours.to_text());
    return std::string();
  });
  if (hooks_.tell) hooks_.tell(account);
  if (hooks_.interrupt) hooks_.interrupt();
  wake_.notify_all();
}

// In the store, for as long as it takes those who wait for this rank to look. Takes and leaves the lock.
void Watch::tell_condemnation(Lock& lock) {
  const auto told_at = Clock::now() + patience_ + patience_ / 4;
  while (!stopping_ && Clock::now() < told_at) {
    const Standing ours = own_standing();
    lock.unlock();
    const bool is_heard = tell_and_listen(ours);
    lock.lock();
    if (!is_heard) break;
    wake_.wait_for(lock, patience_ / 4, [this] { return stopping_; });
  }
  has_told_ = true;
  wake_.notify_all();
}

// The store may end with this rank, and the others would hear of that instead.
void Watch::wait_until_told() {
  if (options_.rank != options_.store_server) return;
  Lock lock(mutex_);
  wake_.wait_for(lock, 2 * patience_, [this] { return !condemned_ || !running_ || has_told_; });
}

std::optional<Account> Watch::account_of(int rank) const {
  const auto text = ask([store = store_, key = keys_[static_cast<size_t>(rank)]] {
    return is_served(store) ? read_key(store, key, std::chrono::milliseconds(0)).value_or("") : "";
  });
  const auto standing = Standing::parse(text.value_or(""));
  if (!standing || standing->account.empty()) return std::nullopt;
  return Account::parse(standing->account);
}

// Who is busy or out of reach the watch of all ranks knows.
std::optional<Verdict> Watch::late(Roll::Wait& wait, const std::optional<Call>& call) {
  if (!options_.world) return roll_.late(wait, call);
  if (!wait.in_world) {
    std::vector<int> awaited = wait.awaited;
    if (awaited.empty()) {
      awaited.resize(static_cast<size_t>(options_.size));
      std::iota(awaited.begin(), awaited.end(), 0);
      std::erase(awaited, options_.rank);
    }
    wait.in_world = std::make_shared<WorldWait>(
        *options_.world, call ? call->describe() : wait.what, options_.names.of(awaited), wait);
  }
  auto verdict = static_cast<WorldWait*>(wait.in_world.get())->verdict();
  if (verdict) {
    const int blamed = options_.names.find(verdict->other, options_.size);
    verdict->other = blamed >= 0 ? blamed : options_.rank;
  }
  return verdict;
}

Watch::WorldWait::WorldWait(Watch& world, std::string what, std::vector<int> ranks,
                            const Roll::Wait& wait)
    : world_(world) {
  const std::lock_guard lock(world_.mutex_);
  const bool is_first = !world_.current_ && world_.texts_.empty() && world_.elsewhere_.empty();
  if (is_first) world_.roll_.begin_period();
  Roll::Wait there = wait;
  there.what = std::move(what);
  there.awaited = std::move(ranks);
  there.by_caller = true;
  wait_ = world_.elsewhere_.insert(world_.elsewhere_.end(), std::move(there));
}

Watch::WorldWait::~WorldWait() {
  const std::lock_guard lock(world_.mutex_);
  world_.elsewhere_.erase(wait_);
  if (world_.elsewhere_.empty()) world_.outside_since_ = Clock::now();
}

std::optional<Verdict> Watch::WorldWait::verdict() const {
  const std::lock_guard lock(world_.mutex_);
  return wait_->verdict;
}

}  // namespace zeropage::comm::detail
