#include "comm/gloo/watch.h"

#include <algorithm>
#include <pthread.h>

#include "comm/detail/broken_pipe.h"
#include "comm/detail/store_calls.h"

namespace zeropage::comm::detail {
namespace {

// How long the store may take to answer.
constexpr auto kStoreLimit = std::chrono::seconds(2);
// Between looks at the store once an operation has waited for long.
constexpr auto kSlowPace = std::chrono::seconds(1);
// An error names this many ranks.
constexpr int kMostRanks = 8;
constexpr char kSeparator = '\x1e';

std::string seconds_since(std::chrono::steady_clock::time_point moment) {
  const auto gone = std::chrono::steady_clock::now() - moment;
  return c10::str(static_cast<double>(
                      std::chrono::duration_cast<std::chrono::milliseconds>(gone).count() / 100) /
                      10.0,
                  " s");
}

}  // namespace

Watch::Watch(const Options& options)
    : options_(options), store_(options.store->clone()), heard_(static_cast<size_t>(options.size)) {
  for (int rank = 0; rank < options.size; ++rank) {
    keys_.push_back(c10::str("standing/", rank));
  }
  // Every key exists, so that all can be read at once. A rank that is lost here is named by its
  // connection to us.
  ask_within(kStoreLimit, [store = store_, key = keys_[static_cast<size_t>(options.rank)]] {
    write_key(*store, key, "");
    return std::string();
  });
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "zp-watch");
    const BrokenPipeScope broken_pipe;
    work();
  });
}

Watch::~Watch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watch::begin(const Call& call) {
  std::lock_guard lock(mutex_);
  current_ = call;
  ++operation_;
  if (call.operation != Operation::kPair) ++begun_;
  began_ = Clock::now();
}

void Watch::end(const Call& call, bool completed) {
  std::lock_guard lock(mutex_);
  current_.reset();
  if (!completed || call.operation == Operation::kPair || call.operation == Operation::kBroadcast)
    return;
  last_shared_ = call;
  last_shared_at_ = Clock::now();
}

void Watch::work() {
  uint64_t beat = 0;
  const auto pace = options_.patience / 4;
  Clock::time_point next_look{};
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    wake_.wait_for(lock, pace);
    const auto now = Clock::now();
    if (stopping_ || !current_ || now < began_ + pace) continue;
    const Call call = *current_;
    lock.unlock();
    const bool lost = find_lost(call);
    lock.lock();
    if (lost) return;
    if (stopping_ || !current_ || now < began_ + options_.patience || now < next_look) continue;
    // After the first few looks there is little hope of news.
    next_look = now < began_ + 4 * options_.patience ? now : now + kSlowPace;
    const Standing ours{++beat, begun_, *current_, ""};
    lock.unlock();
    const bool ended = look(ours);
    lock.lock();
    if (ended) return;
  }
}

// An operation that waits for bytes of a rank that is lost would wait until the deadline.
bool Watch::find_lost(const Call& call) {
  const std::vector<int> lost = options_.lost_ranks();
  const bool needed = call.operation == Operation::kPair
                          ? std::find(lost.begin(), lost.end(), call.peer) != lost.end()
                          : !lost.empty();
  if (!needed) return false;
  {
    std::lock_guard lock(mutex_);
    lost_rank_ = call.operation == Operation::kPair ? call.peer : lost.front();
  }
  options_.interrupt();
  return true;
}

bool Watch::look(Standing ours) {
  if (!tell_and_listen(ours)) return false;
  const auto verdict = judge(ours);
  if (!verdict) return false;
  {
    // Before the others hear of it and end: our connections to them break then.
    std::lock_guard lock(mutex_);
    verdict_ = verdict;
  }
  ours.account = c10::str(ours.call.describe(), ": ", verdict->words);
  wait_until_others_know(ours);
  options_.interrupt();
  return true;
}

bool Watch::tell_and_listen(const Standing& ours) {
  const auto answer =
      ask_within(kStoreLimit, [store = store_, keys = keys_, rank = options_.rank, ours] {
        std::string texts;
        if (!is_served(store)) return texts;
        write_key(*store, keys[static_cast<size_t>(rank)], ours.to_text());
        for (const std::vector<uint8_t>& text : store->multiGet(keys)) {
          texts.append(text.begin(), text.end());
          texts += kSeparator;
        }
        return texts;
      });
  if (!answer || answer->empty()) return false;
  std::istringstream texts(*answer);
  std::string text;
  for (int other = 0; other < options_.size && std::getline(texts, text, kSeparator); ++other) {
    if (other != options_.rank) listen(other, text);
  }
  return true;
}

void Watch::listen(int other, const std::string& text) {
  auto standing = Standing::parse(text);
  if (!standing) return;
  std::lock_guard lock(mutex_);
  Heard& heard = heard_[static_cast<size_t>(other)];
  if (heard.standing && heard.standing->beat != standing->beat) heard.at = Clock::now();
  if (heard.operation != operation_) {
    heard.operation = operation_;
    heard.first_beat = standing->beat;
  }
  heard.standing = std::move(standing);
}

// It has told so since our operation began: what stands in the store may be old.
bool Watch::waits_now(const Heard& heard) const {
  return heard.standing && heard.operation == operation_ &&
         heard.standing->beat != heard.first_beat;
}

std::optional<Watch::Verdict> Watch::judge(const Standing& ours) const {
  std::lock_guard lock(mutex_);
  for (int other = 0; other < options_.size; ++other) {
    const Heard& heard = heard_[static_cast<size_t>(other)];
    if (!waits_now(heard)) continue;
    const Call& call = heard.standing->call;
    if (never_meet(options_.rank, ours, other, *heard.standing)) {
      const bool alike = call.describe() == ours.call.describe();
      return Verdict{
          other, c10::str("rank ", other, " is out of step: it waits in ", call.describe(),
                          alike ? c10::str(" of ", call.bytes, " bytes against ", ours.call.bytes)
                                : std::string(),
                          "; all ranks must call the same operations on the same sizes in the same "
                          "order")};
    }
  }
  for (int other = 0; other < options_.size; ++other) {
    const Heard& heard = heard_[static_cast<size_t>(other)];
    if (waits_now(heard) && !heard.standing->account.empty()) {
      return Verdict{other, c10::str("rank ", other, " failed in ", heard.standing->account)};
    }
  }
  return std::nullopt;
}

// The first rank to end takes its connections with it, perhaps the store, and the others would hear
// of that instead.
void Watch::wait_until_others_know(const Standing& ours) {
  const auto begin = Clock::now();
  Standing telling = ours;
  while (Clock::now() < begin + options_.patience) {
    ++telling.beat;
    if (!tell_and_listen(telling)) return;
    {
      std::unique_lock lock(mutex_);
      const bool all_know = std::all_of(heard_.begin(), heard_.end(), [this](const Heard& heard) {
        return !waits_now(heard) || !heard.standing->account.empty();
      });
      // A rank that began to wait a little after us has a pace to say so.
      if ((all_know && Clock::now() > begin + options_.patience / 4) || stopping_) return;
      wake_.wait_for(lock, options_.patience / 8);
    }
  }
}

std::optional<int> Watch::lost_rank() const {
  std::lock_guard lock(mutex_);
  return lost_rank_;
}

std::optional<Watch::Verdict> Watch::verdict() const {
  std::lock_guard lock(mutex_);
  return verdict_;
}

std::string Watch::describe(int other) const {
  const Heard& heard = heard_[static_cast<size_t>(other)];
  if (waits_now(heard)) {
    const bool silent = Clock::now() > heard.at + 3 * kSlowPace;
    return c10::str("Rank ", other, silent ? " stood at " : " stands at ",
                    heard.standing->call.describe(),
                    silent ? c10::str(", silent for ", seconds_since(heard.at)) : std::string());
  }
  if (!last_shared_) return c10::str("Rank ", other, " has not been heard of yet");
  return c10::str("Rank ", other, " was last heard in ", last_shared_->describe(), ", ",
                  seconds_since(last_shared_at_), " ago");
}

std::string Watch::describe_others() const {
  std::lock_guard lock(mutex_);
  std::string text;
  int named = 0;
  for (int other = 0; other < options_.size; ++other) {
    if (other == options_.rank) continue;
    if (++named > kMostRanks) return text + " ...";
    text += c10::str(text.empty() ? "" : ". ", describe(other));
  }
  return text;
}

}  // namespace zeropage::comm::detail
