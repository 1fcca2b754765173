#include "comm/watch/watch.h"

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
// So many waiting ranks read each other's standings at that pace; more read them less often, as the store
// serves the square of their number.
constexpr double kQuickRanks = 64;
constexpr auto kSlowestLook = milliseconds(10'000);

milliseconds pace_of_crowd(milliseconds pace, int size) {
  const double crowd = std::max(1.0, std::pow(size / kQuickRanks, 2));
  const auto slower = static_cast<int64_t>(static_cast<double>(pace.count()) * crowd);
  return std::max(pace, std::min(milliseconds(slower), kSlowestLook));
}

}  // namespace

Watch::Watch(const Options& options)
    : limits_(options.limits),
      serves_store_(options.rank == options.store_server),
      group_(options.group),
      activity_(options.limits, options.begins_at_call),
      store_(options.store, options.rank, options.size, options.limits.deadline),
      peers_(options.rank, options.size, options.limits.deadline, options.names),
      stalls_(peers_, options.store_server, options.limits) {}

void Watch::start(Hooks hooks) {
  hooks_ = std::move(hooks);
  stalls_.set_facts(hooks_.facts);
  peers_.note_store_answer();
  activity_.set_watched(true);
  wakeups_.start();
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "zp-watch");
    const BrokenPipeScope broken_pipe;
    work();
  });
}

void Watch::stop() {
  activity_.set_watched(false);
  wakeups_.stop();
  if (!thread_.joinable()) return;
  thread_.join();
  if (const auto leave_status = activity_.leave_status()) store_.tell(*leave_status);
}

void Watch::fail_group(const FailureReason& account) {
  if (group_ && !is_leaving_) group_->end_with(*this, account);
}

void Watch::leave_group(const FailureReason& account) {
  if (!is_of_part()) fail_group(account);
}

void Watch::begin_leave() {
  is_leaving_ = is_of_part();
}

bool Watch::is_of_part() const {
  return group_ && group_->world_of(*this) != nullptr;
}

void Watch::fail_with(const FailureReason& account) {
  if (activity_.fail_with(peers_.rank(), account)) wakeups_.tell();
}

// The store may end with this rank, and the others would hear of that instead.
void Watch::wait_until_announced() {
  const auto announced =
      serves_store_ ? WatchWakeups::Announced::kAll : WatchWakeups::Announced::kReason;
  wakeups_.wait_until(announced, 2 * limits_.patience());
}

std::optional<FailureReason> Watch::failure_of(int rank) const {
  const auto status = RankStatus::parse(store_.find(rank));
  if (!status || status->account.empty()) return std::nullopt;
  return FailureReason::parse(status->account);
}

// ---- the thread ----

void Watch::work() {
  const auto patience = limits_.patience();
  const auto pace = patience / 4;
  const auto first_pace = pace_of_crowd(pace, peers_.size());
  // After the first few looks there is little hope of news.
  const auto later_pace = pace_of_crowd(patience, peers_.size());
  const auto answer_pace = std::clamp(limits_.deadline / 12, pace, kSlowestAnswer);
  Clock::time_point next_look{};
  Clock::time_point next_answer = Clock::now() + answer_pace;
  while (!wakeups_.stops_within(pace)) {
    if (wakeups_.is_due()) announce_failure();
    if (const auto call = activity_.operation_begun_by(Clock::now() - pace)) look_for_lost(*call);
    if (wakeups_.stops_within(milliseconds(0))) return;
    const auto now = Clock::now();
    const auto since = activity_.waiting_since();
    if (since && *since + patience <= now) {
      if (now < next_look) continue;
      next_look = now < *since + 4 * patience ? now + first_pace - pace : now + later_pace;
      look();
      next_answer = Clock::now() + answer_pace;
    } else if (now >= next_answer) {
      store_.answer(activity_.report().status);
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
  peers_.set_own_calls(ours.history);
  if (exchange_statuses(ours.status)) peers_.note_store_answer();
  if (wakeups_.stops_within(milliseconds(0))) return;
  const auto check_stall = [&](Wait& wait) { return verdict_on(wait, ours.status); };
  activity_.check_texts(ours, check_stall);
  // Others that hear of it end, and our connections to them break then.
  if (const auto vain = activity_.check_on_device(ours, check_stall)) {
    wait_until_others_know(ours.status, *vain);
    activity_.end_device_with(vain->verdict);
  }
  if (const auto vain = activity_.check_operation(ours, check_stall)) {
    wait_until_others_know(ours.status, *vain);
    if (hooks_.interrupt) hooks_.interrupt();
  }
}

std::optional<Verdict> Watch::verdict_on(Wait& wait, const RankStatus& ours) {
  if (auto verdict = stalls_.certain(wait, ours)) return verdict;
  const auto world = group_ ? group_->world_of(*this) : nullptr;
  return world ? late_in_world(world->activity(), wait) : stalls_.late(wait);
}

std::optional<Verdict> Watch::late_in_world(Activity& world, Wait& wait) const {
  const RankNames& names = peers_.names();
  if (!wait.in_world) {
    std::vector<int> awaited = wait.awaited;
    if (awaited.empty()) {
      awaited.resize(static_cast<size_t>(peers_.size()));
      std::iota(awaited.begin(), awaited.end(), 0);
      std::erase(awaited, peers_.rank());
    }
    wait.in_world =
        std::make_shared<WaitInWorld>(world, wait.describe(), names.of(std::move(awaited)), wait);
  }
  auto verdict = wait.in_world->verdict();
  if (verdict) {
    const int blamed = names.find(verdict->other, peers_.size());
    verdict->other = blamed >= 0 ? blamed : peers_.rank();
  }
  return verdict;
}

bool Watch::exchange_statuses(const RankStatus& ours) {
  const auto texts = store_.exchange(ours);
  if (!texts) return false;
  for (int other = 0; other < peers_.size(); ++other) {
    if (other != peers_.rank()) peers_.listen(other, texts->at(static_cast<size_t>(other)));
  }
  return true;
}

// The first rank to end takes its connections with it, perhaps the store, and the others would hear
// of that instead.
void Watch::wait_until_others_know(RankStatus ours, const Activity::Stalled& vain) {
  const auto begin = Clock::now();
  const auto patience = limits_.patience();
  ours.account = FailureReason{vain.verdict.words, vain.call.describe()}.to_text();
  while (Clock::now() < begin + patience && exchange_statuses(ours)) {
    // A rank that began to wait a little after us has a pace to say so.
    if (peers_.all_will_end() && Clock::now() > begin + patience / 4) return;
    if (wakeups_.stops_within(patience / 8) || wakeups_.is_due()) return;
  }
}

// First where ranks look that lose their connection to this one; then in the store, for as long as it takes
// those who wait for this rank to look.
void Watch::announce_failure() {
  const auto patience = limits_.patience();
  if (hooks_.tell) hooks_.tell(*activity_.failure());
  store_.tell(activity_.report().status);
  if (hooks_.interrupt) hooks_.interrupt();
  wakeups_.note(WatchWakeups::Announced::kReason);
  const auto told_at = Clock::now() + patience + patience / 4;
  while (Clock::now() < told_at && exchange_statuses(activity_.report().status)) {
    if (wakeups_.stops_within(patience / 4)) return;
  }
  wakeups_.note(WatchWakeups::Announced::kAll);
}

}  // namespace zeropage::comm::detail
