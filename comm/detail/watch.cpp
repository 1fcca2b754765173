#include "comm/detail/watch.h"

#include <cmath>
#include <pthread.h>
#include <utility>

#include "comm/detail/broken_pipe.h"
#include "comm/detail/store_calls.h"

namespace zeropage::comm::detail {
namespace {

using std::chrono::milliseconds;

// Until the first look: a rank that is merely a little late is not asked about.
constexpr auto kMostPatience = milliseconds(500);
// Between a busy rank's looks whether somebody asks.
constexpr auto kSlowestAnswer = milliseconds(5000);
// How long the store may take to answer.
constexpr auto kLookLimit = milliseconds(2000);
// So many waiting ranks read each other's standings twice a second; more read them less often, as the store
// serves the square of their number.
constexpr double kQuickRanks = 256;
constexpr auto kSlowestLook = milliseconds(10'000);
// Ranks that are lost are waited for so long where the store does not say why.
constexpr auto kUnexplained = milliseconds(500);
constexpr char kSeparator = '\x1e';
constexpr const char* kAskedKey = "asked";

// After the first few looks there is little hope of news.
milliseconds later_pace(milliseconds patience, int size) {
  const double crowd = std::max(1.0, std::pow(size / kQuickRanks, 2));
  const auto pace = static_cast<int64_t>(static_cast<double>(patience.count()) * crowd);
  return std::min(milliseconds(pace), kSlowestLook);
}

// What lies under the keys, each with kSeparator behind it.
std::string texts_of(c10d::Store& store, const std::vector<std::string>& keys) {
  std::string texts;
  for (const std::vector<uint8_t>& text : store.multiGet(keys)) {
    texts.append(text.begin(), text.end());
    texts += kSeparator;
  }
  return texts;
}

}  // namespace

Watch::Watch(const Options& options)
    : options_(options),
      store_(options.store->clone()),
      patience_(std::min(kMostPatience, options.limits.deadline / 4)),
      roll_({options.rank, options.size, options.store_server, options.limits, options.names}) {
  for (int rank = 0; rank < options.size; ++rank) {
    keys_.push_back(c10::str("standing/", rank));
  }
  // Every key exists, so that all can be read at once. A rank that is lost here is named by its
  // connection to us.
  ask_within(kLookLimit, [store = store_, key = own_key()] {
    write_key(*store, key, "");
    write_key(*store, kAskedKey, "");
    return std::string();
  });
}

void Watch::start(Hooks hooks) {
  hooks_ = std::move(hooks);
  {
    const std::lock_guard lock(mutex_);
    roll_.learn(hooks_.facts);
    running_ = true;
  }
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "zp-watch");
    const BrokenPipeScope broken_pipe;
    work();
  });
}

void Watch::stop() {
  {
    const std::lock_guard in_turn(condemning_);
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    running_ = false;
  }
  wake_.notify_all();
  if (!thread_.joinable()) return;
  thread_.join();
  say_farewell();
}

// Only where all that was begun has completed: else the others must take this rank for lost.
void Watch::say_farewell() {
  Standing ours;
  {
    const std::lock_guard lock(mutex_);
    if (has_failed_ || current_) return;
    ours = {.beat = ++beat_, .begun = begun_, .where = Standing::Where::kLeft};
  }
  ask([store = store_, key = own_key(), ours] {
    if (is_served(store)) write_key(*store, key, ours.to_text());
    return std::string();
  });
}

// ---- what this rank does ----

// Returns whether it cannot end.
bool Watch::begin(const Call& call) {
  const std::lock_guard lock(mutex_);
  current_ = call;
  roll_.begin_period();
  if (call.operation != Operation::kPair) ++begun_;
  wait_ = roll_.begin_wait("", options_.limits.deadline);
  if (call.operation == Operation::kPair) wait_.awaited = {call.peer};
  return condemned_.has_value();
}

void Watch::end(const Call& call, bool completed) {
  const std::lock_guard lock(mutex_);
  last_ = std::exchange(current_, std::nullopt);
  wait_.in_world.reset();
  outside_since_ = Clock::now();
  has_failed_ = has_failed_ || !completed;
  if (!completed || call.operation == Operation::kPair || may_end_early(call.operation)) return;
  roll_.note_shared(call);
}

void Watch::begin_on_device(const Call& call) {
  const std::lock_guard lock(mutex_);
  on_device_ = call;
  roll_.begin_period();
  device_wait_ = roll_.begin_wait("", options_.limits.deadline);
  if (call.operation == Operation::kPair) device_wait_.awaited = {call.peer};
}

void Watch::end_on_device() {
  const std::lock_guard lock(mutex_);
  on_device_.reset();
  device_wait_.in_world.reset();
}

std::optional<Verdict> Watch::verdict_on_device() const {
  const std::lock_guard lock(mutex_);
  if (condemned_) return verdict_;
  return on_device_ ? device_wait_.verdict : std::nullopt;
}

Watch::TextWait::TextWait(Watch& watch, const std::string& topic, milliseconds deadline)
    : watch_(watch) {
  const std::lock_guard lock(watch_.mutex_);
  watch_.roll_.begin_period();
  Roll::Wait wait = watch_.roll_.begin_wait(topic, deadline);
  wait.by_caller = std::this_thread::get_id() == watch_.caller_;
  wait_ = watch_.texts_.insert(watch_.texts_.end(), std::move(wait));
}

Watch::TextWait::~TextWait() {
  const std::lock_guard lock(watch_.mutex_);
  if (wait_->by_caller) watch_.outside_since_ = Clock::now();
  watch_.texts_.erase(wait_);
}

void Watch::TextWait::await(int rank) {
  const std::lock_guard lock(watch_.mutex_);
  wait_->awaited = {rank};
}

std::optional<Verdict> Watch::TextWait::verdict() const {
  const std::lock_guard lock(watch_.mutex_);
  if (watch_.condemned_) return watch_.verdict_;
  if (watch_.running_ || wait_->verdict) return wait_->verdict;
  if (Clock::now() < wait_->began + wait_->deadline) return std::nullopt;
  return Verdict();
}

// Under the lock.
Standing Watch::own_standing() {
  const auto now = Clock::now();
  const auto since = [now](Clock::time_point moment) {
    return std::chrono::duration_cast<milliseconds>(now - moment).count();
  };
  Standing ours{.beat = ++beat_, .begun = begun_};
  const auto texts =
      std::find_if(texts_.begin(), texts_.end(), [](const auto& wait) { return wait.by_caller; });
  if (current_) {
    ours.call = *current_;
    ours.since_ms = since(wait_.began);
  } else if (texts != texts_.end()) {
    ours.where = Standing::Where::kInTexts;
    ours.words = texts->what;
    ours.since_ms = since(texts->began);
    const bool is_idle = now > std::max(outside_since_, texts->began) + patience_ / 2;
    if (!options_.begins_at_call || !is_idle) ours.begun = Standing::kMayBeginMore;
  } else if (on_device_) {
    ours.where = Standing::Where::kOnDevice;
    ours.call = *on_device_;
    ours.since_ms = since(device_wait_.began);
  } else if (!elsewhere_.empty()) {
    ours.where = Standing::Where::kElsewhere;
    ours.words = elsewhere_.front().what;
    ours.since_ms = since(elsewhere_.front().began);
  } else {
    ours.where = Standing::Where::kOutside;
    ours.words = last_ ? last_->describe() : "";
    ours.since_ms = since(outside_since_);
  }
  if (condemned_) ours.account = condemned_->to_text();
  return ours;
}

// ---- the thread ----

void Watch::work() {
  const auto pace = patience_ / 4;
  const auto slow_pace = later_pace(patience_, options_.size);
  const auto answer_pace = std::clamp(options_.limits.deadline / 12, pace, kSlowestAnswer);
  Clock::time_point next_look{};
  Clock::time_point next_answer = Clock::now() + answer_pace;
  bool broken = false;  // operations have ended for good; texts may go on
  Lock lock(mutex_);
  while (!stopping_) {
    wake_.wait_for(lock, pace);
    if (!stopping_ && !broken && current_ && Clock::now() >= wait_.began + pace) {
      broken = find_lost(lock);
    }
    if (stopping_) return;
    if (condemned_ && !has_told_) tell_condemnation(lock);
    const auto now = Clock::now();
    Clock::time_point began = now;
    if (current_ && !broken) began = wait_.began;
    if (on_device_ && !device_wait_.verdict) began = std::min(began, device_wait_.began);
    for (const Roll::Wait& wait : texts_) began = std::min(began, wait.began);
    for (const Roll::Wait& wait : elsewhere_) began = std::min(began, wait.began);
    if (began + patience_ <= now) {
      if (now < next_look) continue;
      next_look = now < began + 4 * patience_ ? now : now + slow_pace;
      look(lock);
      broken = broken || verdict_.has_value();
      next_answer = Clock::now() + answer_pace;
    } else if (now >= next_answer) {
      answer(lock);
      next_answer = Clock::now() + answer_pace;
    }
  }
}

// An operation that waits for bytes of a rank that is lost would wait for nothing. Takes and leaves the
// lock; returns whether it has ended the operation.
bool Watch::find_lost(Lock& lock) {
  if (!hooks_.lost_ranks) return false;
  const Call call = *current_;
  lock.unlock();
  std::vector<int> lost = hooks_.lost_ranks();
  if (call.operation == Operation::kPair) {
    const bool has_peer = std::find(lost.begin(), lost.end(), call.peer) != lost.end();
    lost = has_peer ? std::vector<int>{call.peer} : std::vector<int>();
  }
  const auto missed = first_missed(lost, call);
  lock.lock();
  if (!missed) return false;
  lost_rank_ = *missed;
  lock.unlock();
  hooks_.interrupt();
  lock.lock();
  return true;
}

// Of those that are lost one without which the operation cannot end. Not one that has ended after it:
// ranks end an operation one after the other, and the first may be gone before the last has its bytes.
std::optional<int> Watch::first_missed(const std::vector<int>& lost, const Call& call) {
  if (lost.empty()) return std::nullopt;
  std::vector<std::string> keys;
  for (const int rank : lost) keys.push_back(keys_[static_cast<size_t>(rank)]);
  const auto answer = ask(
      [store = store_, keys] { return is_served(store) ? texts_of(*store, keys) : std::string(); });
  if (!answer || answer->empty()) {
    // The server of the store may have ended after the operation too, and then cannot say so.
    if (!unexplained_since_) unexplained_since_ = Clock::now();
    if (Clock::now() < *unexplained_since_ + kUnexplained) return std::nullopt;
    return lost.front();
  }
  unexplained_since_.reset();
  std::istringstream texts(*answer);
  std::string text;
  for (const int rank : lost) {
    std::getline(texts, text, kSeparator);
    const auto standing = Standing::parse(text);
    if (!standing || !standing->has_left_after(call)) return rank;
  }
  return std::nullopt;
}

void Watch::look(Lock& lock) {
  const Standing ours = own_standing();
  const uint64_t period = roll_.period();
  lock.unlock();
  const bool answered = tell_and_listen(ours);
  lock.lock();
  if (answered) roll_.note_answer_of_store();
  // What has begun since has not been told, and is looked at the next time.
  if (stopping_ || period != roll_.period()) return;
  for (Roll::Wait& wait : texts_) {
    if (!wait.verdict && wait.by_caller && !current_) wait.verdict = roll_.out_of_step(ours);
    if (!wait.verdict) wait.verdict = late(wait, std::nullopt);
  }
  for (Roll::Wait& wait : elsewhere_) {
    if (!wait.verdict) wait.verdict = roll_.late(wait, std::nullopt);
  }
  if (on_device_ && !device_wait_.verdict) look_at_device(lock, ours);
  if (!current_ || verdict_) return;
  // Before the others hear of it and end: our connections to them break then.
  verdict_ = roll_.out_of_step(ours);
  if (!verdict_) verdict_ = roll_.failed();
  if (!verdict_) verdict_ = late(wait_, current_);
  if (verdict_) end_call(lock, ours);
}

void Watch::look_at_device(Lock& lock, Standing ours) {
  std::optional<Verdict> verdict;
  if (ours.where == Standing::Where::kOnDevice) verdict = roll_.out_of_step(ours);
  if (!verdict) verdict = roll_.failed();
  if (!verdict) verdict = late(device_wait_, on_device_);
  if (!verdict) return;
  ours.account = Account{verdict->words, on_device_->describe()}.to_text();
  lock.unlock();
  wait_until_others_know(ours);
  lock.lock();
  device_wait_.verdict = verdict;
}

void Watch::end_call(Lock& lock, Standing ours) {
  ours.account = Account{verdict_->words, ours.call.describe()}.to_text();
  lock.unlock();
  wait_until_others_know(ours);
  if (hooks_.interrupt) hooks_.interrupt();
  lock.lock();
}

std::optional<std::string> Watch::ask(std::function<std::string()> question) const {
  const auto limit =
      std::clamp(options_.limits.deadline / 8, milliseconds(kLookLimit / 10), kLookLimit);
  return ask_within(limit, std::move(question));
}

// For the others, who may wait for us.
void Watch::answer(Lock& lock) {
  const Standing ours = own_standing();
  const std::string seen = asked_;
  lock.unlock();
  const auto asked = ask([store = store_, key = own_key(), ours, seen] {
    if (!is_served(store)) return seen;
    const std::vector<uint8_t> bytes = store->get(kAskedKey);
    std::string now(bytes.begin(), bytes.end());
    if (now != seen) write_key(*store, key, ours.to_text());
    return now;
  });
  lock.lock();
  if (asked) asked_ = *asked;
}

bool Watch::tell_and_listen(const Standing& ours) {
  const auto answer =
      ask([store = store_, keys = keys_, own = own_key(), rank = options_.rank, ours] {
        if (!is_served(store)) return std::string();
        write_key(*store, own, ours.to_text());
        write_key(*store, kAskedKey, c10::str(rank, "/", ours.beat));
        return texts_of(*store, keys);
      });
  if (!answer || answer->empty()) return false;
  std::istringstream texts(*answer);
  std::string text;
  const std::lock_guard lock(mutex_);
  for (int other = 0; other < options_.size && std::getline(texts, text, kSeparator); ++other) {
    if (other != options_.rank) roll_.listen(other, text);
  }
  return true;
}

// The first rank to end takes its connections with it, perhaps the store, and the others would hear
// of that instead.
void Watch::wait_until_others_know(const Standing& ours) {
  const auto begin = Clock::now();
  Standing telling = ours;
  while (Clock::now() < begin + patience_) {
    {
      const std::lock_guard lock(mutex_);
      telling.beat = ++beat_;
    }
    if (!tell_and_listen(telling)) return;
    Lock lock(mutex_);
    // A rank that began to wait a little after us has a pace to say so.
    if ((roll_.all_know() && Clock::now() > begin + patience_ / 4) || stopping_) return;
    wake_.wait_for(lock, patience_ / 8);
  }
}

std::optional<int> Watch::lost_rank() const {
  const std::lock_guard lock(mutex_);
  return lost_rank_;
}

std::optional<Verdict> Watch::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

}  // namespace zeropage::comm::detail
