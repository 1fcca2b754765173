#include "comm/watch/activity.h"

#include <algorithm>
#include <utility>

#include "comm/detail/peer_error.h"

namespace zeropage::comm::detail {

namespace {

using std::chrono::milliseconds;

// One of the thread that calls operations. Null: there is none.
const Wait* find_wait(const std::list<Wait>& waits, RankStatus::Where where) {
  const auto found = std::find_if(waits.begin(), waits.end(), [where](const Wait& wait) {
    return wait.by_caller && wait.where == where;
  });
  return found == waits.end() ? nullptr : &*found;
}

}  // namespace

// ---- what this rank does ----

void Activity::begin(const Call& call) {
  const std::lock_guard lock(mutex_);
  if (failure_) throw PeerError::of_abort(verdict_->other);
  ++history_.waits;
  if (call.operation != Operation::kPair) ++history_.collectives;
  operation_ = Wait::for_call(RankStatus::Where::kInCall, call, limits_.deadline);
}

void Activity::end(const Call& call, bool completed) {
  const std::lock_guard lock(mutex_);
  operation_.reset();
  history_.last = call;
  history_.outside_since = Clock::now();
  history_.has_failed = history_.has_failed || !completed;
  if (completed && call.end == Call::End::kSends) ++history_.sent[call.peer];
  if (!completed || call.operation == Operation::kPair || may_end_early(call.operation)) return;
  history_.last_shared = call;
  history_.last_shared_at = history_.outside_since;
}

void Activity::begin_on_device(const Call& call) {
  const std::lock_guard lock(mutex_);
  ++history_.waits;
  on_device_ = Wait::for_call(RankStatus::Where::kOnDevice, call, limits_.deadline);
}

void Activity::end_on_device() {
  const std::lock_guard lock(mutex_);
  on_device_.reset();
}

std::optional<Verdict> Activity::verdict_on_device() const {
  const std::lock_guard lock(mutex_);
  if (failure_) return verdict_;
  return on_device_ ? on_device_->verdict : std::nullopt;
}

std::optional<Verdict> Activity::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

Activity::TextWait::TextWait(Activity& activity, const std::string& topic, milliseconds deadline)
    : activity_(activity) {
  const std::lock_guard lock(activity_.mutex_);
  ++activity_.history_.waits;
  Wait wait;
  wait.where = RankStatus::Where::kInTexts;
  wait.words = topic;
  wait.texts = ++activity_.history_.texts;
  wait.deadline = deadline;
  wait.by_caller = std::this_thread::get_id() == activity_.caller_;
  wait_ = activity_.texts_.insert(activity_.texts_.end(), std::move(wait));
}

Activity::TextWait::~TextWait() {
  const std::lock_guard lock(activity_.mutex_);
  if (wait_->by_caller) activity_.history_.outside_since = Clock::now();
  activity_.texts_.erase(wait_);
}

void Activity::TextWait::await(int rank) {
  const std::lock_guard lock(activity_.mutex_);
  wait_->awaited = {rank};
}

std::optional<Verdict> Activity::TextWait::verdict() const {
  const std::lock_guard lock(activity_.mutex_);
  if (activity_.failure_) return activity_.verdict_;
  if (activity_.is_watched_ || wait_->verdict) return wait_->verdict;
  if (Clock::now() < wait_->began + wait_->deadline) return std::nullopt;
  return Verdict();
}

bool Activity::fail_with(int rank, const FailureReason& account) {
  const std::lock_guard lock(mutex_);
  if (history_.has_failed || verdict_) return false;
  failure_ = account;
  history_.has_failed = true;
  verdict_ = Verdict{Verdict::Kind::kFailed, rank,
                     c10::str(account.cause, ". This rank had failed of it",
                              account.call.empty() ? "" : " in " + account.call)};
  return true;
}

std::optional<FailureReason> Activity::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

WaitInWorld::WaitInWorld(Activity& world, std::string what, std::vector<int> ranks,
                         const Wait& wait)
    : world_(world) {
  const std::lock_guard lock(world_.mutex_);
  // What the others told before this rank waited for anybody may be old.
  if (!world_.operation_ && world_.texts_.empty()) ++world_.history_.waits;
  Wait there = wait;
  there.where = RankStatus::Where::kElsewhere;
  there.words = std::move(what);
  there.awaited = std::move(ranks);
  there.by_caller = true;
  wait_ = world_.texts_.insert(world_.texts_.end(), std::move(there));
}

WaitInWorld::~WaitInWorld() {
  const std::lock_guard lock(world_.mutex_);
  world_.texts_.erase(wait_);
  if (find_wait(world_.texts_, RankStatus::Where::kElsewhere) == nullptr) {
    world_.history_.outside_since = Activity::Clock::now();
  }
}

std::optional<Verdict> WaitInWorld::verdict() const {
  const std::lock_guard lock(world_.mutex_);
  return wait_->verdict;
}

// ---- what the watch sees ----

void Activity::set_watched(bool is_watched) {
  const std::lock_guard lock(mutex_);
  is_watched_ = is_watched;
}

Activity::Report Activity::report() const {
  const std::lock_guard lock(mutex_);
  return {status(), history_};
}

std::optional<RankStatus> Activity::leave_status() const {
  const std::lock_guard lock(mutex_);
  if (history_.has_failed || operation_) return std::nullopt;
  return RankStatus{.begun = history_.collectives, .where = RankStatus::Where::kLeft};
}

// Under the lock.
RankStatus Activity::status() const {
  const auto now = Clock::now();
  const auto since = [now](Clock::time_point moment) {
    return std::chrono::duration_cast<milliseconds>(now - moment).count();
  };
  RankStatus ours{.begun = history_.collectives, .texts = history_.texts, .sent = history_.sent};
  const Wait* const texts = find_wait(texts_, RankStatus::Where::kInTexts);
  const Wait* const elsewhere = find_wait(texts_, RankStatus::Where::kElsewhere);
  if (operation_) {
    ours.call = operation_->call;
    ours.since_ms = since(operation_->began);
  } else if (texts != nullptr) {
    ours.where = RankStatus::Where::kInTexts;
    ours.words = texts->words;
    ours.texts = texts->texts;
    ours.since_ms = since(texts->began);
    const bool is_idle =
        now > std::max(history_.outside_since, texts->began) + limits_.patience() / 2;
    if (!begins_at_call_ || !is_idle) ours.begun = RankStatus::kMayBeginMore;
  } else if (on_device_) {
    ours.where = RankStatus::Where::kOnDevice;
    ours.call = on_device_->call;
    ours.since_ms = since(on_device_->began);
  } else if (elsewhere != nullptr) {
    ours.where = RankStatus::Where::kElsewhere;
    ours.words = elsewhere->words;
    ours.since_ms = since(elsewhere->began);
  } else {
    ours.where = RankStatus::Where::kOutside;
    ours.words = history_.last ? history_.last->describe() : "";
    ours.since_ms = since(history_.outside_since);
  }
  if (failure_) ours.account = failure_->to_text();
  return ours;
}

std::optional<Activity::Clock::time_point> Activity::waiting_since() const {
  const std::lock_guard lock(mutex_);
  std::optional<Clock::time_point> earliest;
  const auto add = [&](const Wait& wait) {
    earliest = earliest ? std::min(*earliest, wait.began) : wait.began;
  };
  if (operation_ && !verdict_) add(*operation_);
  if (on_device_ && !on_device_->verdict) add(*on_device_);
  for (const Wait& wait : texts_) add(wait);
  return earliest;
}

std::optional<Call> Activity::operation_begun_by(Clock::time_point moment) const {
  const std::lock_guard lock(mutex_);
  if (!operation_ || verdict_ || operation_->began > moment) return std::nullopt;
  return operation_->call;
}

void Activity::check_texts(const Report& report, const StallCheck& check_stall) {
  const std::lock_guard lock(mutex_);
  if (history_.waits != report.history.waits) return;
  for (Wait& wait : texts_) {
    if (!wait.verdict) wait.verdict = check_stall(wait);
  }
}

std::optional<Activity::Stalled> Activity::check_operation(const Report& report,
                                                           const StallCheck& check_stall) {
  const std::lock_guard lock(mutex_);
  if (history_.waits != report.history.waits || !operation_ || verdict_) return std::nullopt;
  verdict_ = check_stall(*operation_);
  if (!verdict_) return std::nullopt;
  return Stalled{*verdict_, operation_->call};
}

std::optional<Activity::Stalled> Activity::check_on_device(const Report& report,
                                                           const StallCheck& check_stall) {
  const std::lock_guard lock(mutex_);
  if (history_.waits != report.history.waits || !on_device_ || on_device_->verdict) {
    return std::nullopt;
  }
  const auto verdict = check_stall(*on_device_);
  if (!verdict) return std::nullopt;
  return Stalled{*verdict, on_device_->call};
}

void Activity::end_device_with(const Verdict& verdict) {
  const std::lock_guard lock(mutex_);
  if (on_device_) on_device_->verdict = verdict;
}

void Activity::end_operations_with(const Verdict& verdict) {
  const std::lock_guard lock(mutex_);
  if (!verdict_) verdict_ = verdict;
}

}  // namespace zeropage::comm::detail
