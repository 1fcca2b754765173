#include "comm/detail/activity.h"

#include <algorithm>
#include <utility>

namespace zeropage::comm::detail {

using std::chrono::milliseconds;

// ---- what this rank does ----

void Activity::begin(const Call& call) {
  const std::lock_guard lock(mutex_);
  ++history_.waits;
  if (call.operation != Operation::kPair) ++history_.collectives;
  operation_ = Wait::for_call(Standing::Where::kInCall, call, limits_.deadline);
}

void Activity::end(const Call& call, bool completed) {
  const std::lock_guard lock(mutex_);
  operation_.reset();
  history_.last = call;
  history_.outside_since = Clock::now();
  history_.has_failed = history_.has_failed || !completed;
  if (!completed || call.operation == Operation::kPair || call.operation == Operation::kBroadcast) {
    return;
  }
  history_.last_shared = call;
  history_.last_shared_at = history_.outside_since;
}

void Activity::begin_on_device(const Call& call) {
  const std::lock_guard lock(mutex_);
  ++history_.waits;
  on_device_ = Wait::for_call(Standing::Where::kOnDevice, call, limits_.deadline);
}

void Activity::end_on_device() {
  const std::lock_guard lock(mutex_);
  on_device_.reset();
}

std::optional<Verdict> Activity::verdict_on_device() const {
  const std::lock_guard lock(mutex_);
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
  wait.where = Standing::Where::kInTexts;
  wait.words = topic;
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
  if (activity_.is_watched_ || wait_->verdict) return wait_->verdict;
  if (Clock::now() < wait_->began + wait_->deadline) return std::nullopt;
  return Verdict();
}

// ---- what the watch sees ----

void Activity::set_watched(bool is_watched) {
  const std::lock_guard lock(mutex_);
  is_watched_ = is_watched;
}

Activity::Report Activity::report() const {
  const std::lock_guard lock(mutex_);
  return {standing(), history_};
}

std::optional<Standing> Activity::farewell() const {
  const std::lock_guard lock(mutex_);
  if (history_.has_failed || operation_) return std::nullopt;
  return Standing{.begun = history_.collectives, .where = Standing::Where::kLeft};
}

// Under the lock.
Standing Activity::standing() const {
  const auto now = Clock::now();
  const auto since = [now](Clock::time_point moment) {
    return std::chrono::duration_cast<milliseconds>(now - moment).count();
  };
  Standing ours{.begun = history_.collectives};
  const auto texts =
      std::find_if(texts_.begin(), texts_.end(), [](const Wait& wait) { return wait.by_caller; });
  if (operation_) {
    ours.call = operation_->call;
    ours.since_ms = since(operation_->began);
  } else if (texts != texts_.end()) {
    ours.where = Standing::Where::kInTexts;
    ours.words = texts->words;
    ours.since_ms = since(texts->began);
    const bool is_idle =
        now > std::max(history_.outside_since, texts->began) + limits_.patience() / 2;
    if (!begins_at_call_ || !is_idle) ours.begun = Standing::kMayBeginMore;
  } else if (on_device_) {
    ours.where = Standing::Where::kOnDevice;
    ours.call = on_device_->call;
    ours.since_ms = since(on_device_->began);
  } else {
    ours.where = Standing::Where::kOutside;
    ours.words = history_.last ? history_.last->describe() : "";
    ours.since_ms = since(history_.outside_since);
  }
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

void Activity::judge_texts(const Report& report, const Judgement& judge) {
  const std::lock_guard lock(mutex_);
  if (history_.waits != report.history.waits) return;
  for (Wait& wait : texts_) {
    if (!wait.verdict) wait.verdict = judge(wait);
  }
}

std::optional<Activity::InVain> Activity::judge_operation(const Report& report,
                                                          const Judgement& judge) {
  const std::lock_guard lock(mutex_);
  if (history_.waits != report.history.waits || !operation_ || verdict_) return std::nullopt;
  verdict_ = judge(*operation_);
  if (!verdict_) return std::nullopt;
  return InVain{*verdict_, operation_->call};
}

std::optional<Activity::InVain> Activity::judge_on_device(const Report& report,
                                                          const Judgement& judge) {
  const std::lock_guard lock(mutex_);
  if (history_.waits != report.history.waits || !on_device_ || on_device_->verdict) {
    return std::nullopt;
  }
  const auto verdict = judge(*on_device_);
  if (!verdict) return std::nullopt;
  return InVain{*verdict, on_device_->call};
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
