#include "comm/detail/watch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <pthread.h>
#include <utility>

#include "comm/detail/broken_pipe.h"

namespace zeropage::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Between a busy rank's looks whether somebody asks.
constexpr auto kSlowestAnswer = milliseconds(5000);
// So many waiting ranks read each other's standings twice a second; more read them less often, as the store
// serves the square of their number.
constexpr double kQuickRanks = 256;
constexpr auto kSlowestLook = milliseconds(10'000);

// After the first few looks there is little hope of news.
milliseconds later_pace(milliseconds patience, int size) {
  const double crowd = std::max(1.0, std::pow(size / kQuickRanks, 2));
  const auto pace = static_cast<int64_t>(static_cast<double>(patience.count()) * crowd);
  return std::min(milliseconds(pace), kSlowestLook);
}

}  // namespace

Watch::Watch(const Options& options)
    : limits_(options.limits),
      serves_store_(options.rank == options.store_server),
      kin_(options.kin),
      activity_(options.limits, options.begins_at_call),
      store_(options.store, options.rank, options.size, options.limits.deadline),
      roll_(options.rank, options.size, options.limits.deadline, options.names),
      judge_(roll_, options.store_server, options.limits) {}

void Watch::start(Hooks hooks) {
  hooks_ = std::move(hooks);
  judge_.learn(hooks_.facts);
  roll_.note_answer_of_store();
  activity_.set_watched(true);
  errands_.start();
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "zp-watch");
    const BrokenPipeScope broken_pipe;
    work();
  });
}

void Watch::stop() {
  activity_.set_watched(false);
  errands_.stop();
  if (!thread_.joinable()) return;
  thread_.join();
  if (const auto farewell = activity_.farewell()) store_.tell(*farewell);
}

void Watch::tell_kin(const Account& account) {
  if (kin_ && !is_leaving_) kin_->end_with(*this, account);
}

void Watch::tell_kin_of_leave(const Account& account) {
  if (!is_of_part()) tell_kin(account);
}

void Watch::begin_leave() {
  is_leaving_ = is_of_part();
}

bool Watch::is_of_part() const {
  return kin_ && kin_->world_of(*this) != nullptr;
}

void Watch::condemn(const Account& account) {
  if (activity_.condemn(roll_.rank(), account)) errands_.tell();
}

// The store may end with this rank, and the others would hear of that instead.
void Watch::wait_until_told() {
  const auto told = serves_store_ ? Errands::Told::kAll : Errands::Told::kAccount;
  errands_.wait_until(told, 2 * limits_.patience());
}

std::optional<Account> Watch::account_of(int rank) const {
  const auto standing = Standing::parse(store_.find(rank));
  if (!standing || standing->account.empty()) return std::nullopt;
  return Account::parse(standing->account);
}

// ---- the thread ----

void Watch::work() {
  const auto patience = limits_.patience();
  const auto pace = patience / 4;
  const auto slow_pace = later_pace(patience, roll_.size());
  const auto answer_pace = std::clamp(limits_.deadline / 12, pace, kSlowestAnswer);
  Clock::time_point next_look{};
  Clock::time_point next_answer = Clock::now() + answer_pace;
  while (!errands_.stops_within(pace)) {
    if (errands_.is_due()) tell_of_failure();
    if (const auto call = activity_.operation_begun_by(Clock::now() - pace)) look_for_lost(*call);
    if (errands_.stops_within(milliseconds(0))) return;
    const auto now = Clock::now();
    const auto since = activity_.waiting_since();
    if (since && *since + patience <= now) {
      if (now < next_look) continue;
      next_look = now < *since + 4 * patience ? now : now + slow_pace;
      look();
      next_answer = Clock::now() + answer_pace;
    } else if (now >= next_answer) {
      store_.answer(activity_.report().standing);
      next_answer = Clock::now() + answer_pace;
    }
  }
}

// An operation that waits for bytes of a rank that is lost would wait for nothing.
void Watch::look_for_lost(const Call& call) {
  if (!hooks_.lost_ranks) return;
  const auto missed = lost_.first_missed(hooks_.lost_ranks(), call);
  if (!missed) return;
  activity_.end_operations_with(
      {Verdict::Kind::kLost, *missed, "its connection broke in the middle of a message"});
  hooks_.interrupt();
}

void Watch::look() {
  const Activity::Report ours = activity_.report();
  roll_.turn_to(ours.history);
  if (tell_and_listen(ours.standing)) roll_.note_answer_of_store();
  if (errands_.stops_within(milliseconds(0))) return;
  const auto judge = [&](Wait& wait) { return verdict_on(wait, ours.standing); };
  activity_.judge_texts(ours, judge);
  // Others that hear of it end, and our connections to them break then.
  if (const auto vain = activity_.judge_on_device(ours, judge)) {
    wait_until_others_know(ours.standing, *vain);
    activity_.end_device_with(vain->verdict);
  }
  if (const auto vain = activity_.judge_operation(ours, judge)) {
    wait_until_others_know(ours.standing, *vain);
    if (hooks_.interrupt) hooks_.interrupt();
  }
}

std::optional<Verdict> Watch::verdict_on(Wait& wait, const Standing& ours) {
  if (auto verdict = judge_.certain(wait, ours)) return verdict;
  const auto world = kin_ ? kin_->world_of(*this) : nullptr;
  return world ? late_in_world(world->activity(), wait) : judge_.late(wait);
}

std::optional<Verdict> Watch::late_in_world(Activity& world, Wait& wait) const {
  const RankNames& names = roll_.names();
  if (!wait.in_world) {
    std::vector<int> awaited = wait.awaited;
    if (awaited.empty()) {
      awaited.resize(static_cast<size_t>(roll_.size()));
      std::iota(awaited.begin(), awaited.end(), 0);
      std::erase(awaited, roll_.rank());
    }
    wait.in_world =
        std::make_shared<WaitInWorld>(world, wait.describe(), names.of(std::move(awaited)), wait);
  }
  auto verdict = wait.in_world->verdict();
  if (verdict) {
    const int blamed = names.find(verdict->other, roll_.size());
    verdict->other = blamed >= 0 ? blamed : roll_.rank();
  }
  return verdict;
}

bool Watch::tell_and_listen(const Standing& ours) {
  const auto texts = store_.exchange(ours);
  if (!texts) return false;
  for (int other = 0; other < roll_.size(); ++other) {
    if (other != roll_.rank()) roll_.listen(other, texts->at(static_cast<size_t>(other)));
  }
  return true;
}

// The first rank to end takes its connections with it, perhaps the store, and the others would hear
// of that instead.
void Watch::wait_until_others_know(Standing ours, const Activity::InVain& vain) {
  const auto begin = Clock::now();
  const auto patience = limits_.patience();
  ours.account = Account{vain.verdict.words, vain.call.describe()}.to_text();
  while (Clock::now() < begin + patience && tell_and_listen(ours)) {
    // A rank that began to wait a little after us has a pace to say so.
    if (roll_.all_know() && Clock::now() > begin + patience / 4) return;
    if (errands_.stops_within(patience / 8) || errands_.is_due()) return;
  }
}

// First where ranks look that lose their connection to this one; then in the store, for as long as it takes
// those who wait for this rank to look.
void Watch::tell_of_failure() {
  const auto patience = limits_.patience();
  if (hooks_.tell) hooks_.tell(*activity_.condemned());
  store_.tell(activity_.report().standing);
  if (hooks_.interrupt) hooks_.interrupt();
  errands_.note(Errands::Told::kAccount);
  const auto told_at = Clock::now() + patience + patience / 4;
  while (Clock::now() < told_at && tell_and_listen(activity_.report().standing)) {
    if (errands_.stops_within(patience / 4)) return;
  }
  errands_.note(Errands::Told::kAll);
}

}  // namespace zeropage::comm::detail
