#include "comm/watch/status_store.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <utility>

#include "comm/watch/store_calls.h"

namespace zeropage::comm::detail {
namespace {

using std::chrono::milliseconds;

// How long the store may take to answer.
constexpr auto kMostPatience = milliseconds(2000);
constexpr char kBetweenTexts = '\x1e';
constexpr const char* kAskedKey = "asked";

// What lies under the keys, each with kBetweenTexts behind it.
std::string joined_texts(c10d::Store& store, const std::vector<std::string>& keys) {
  std::string texts;
  for (const std::vector<uint8_t>& text : store.multiGet(keys)) {
    texts.append(text.begin(), text.end());
    texts += kBetweenTexts;
  }
  return texts;
}

std::optional<std::vector<std::string>> divided(const std::optional<std::string>& joined) {
  if (!joined || joined->empty()) return std::nullopt;
  std::vector<std::string> texts;
  std::istringstream in(*joined);
  for (std::string text; std::getline(in, text, kBetweenTexts);) texts.push_back(text);
  return texts;
}

}  // namespace

class StatusStore::Turns : public std::enable_shared_from_this<Turns> {
 public:
  // Ends when the last copy of it goes. Null: the question before has no answer yet.
  std::shared_ptr<const void> next_within(milliseconds limit) {
    std::unique_lock lock(mutex_);
    if (!free_.wait_for(lock, limit, [&] { return !taken_; })) return nullptr;
    taken_ = true;
    return {this, [turns = shared_from_this()](const void*) { turns->end(); }};
  }

 private:
  void end() {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    free_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

StatusStore::StatusStore(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         milliseconds deadline)
    : store_(store),
      rank_(rank),
      limit_(std::clamp(deadline / 8, kMostPatience / 10, kMostPatience)),
      turns_(std::make_shared<Turns>()) {
  for (int other = 0; other < size; ++other) keys_.push_back(c10::str("standing/", other));
  // Every key exists, so that all can be read at once. A rank that is lost here is named by its
  // connection to us.
  ask_within(kMostPatience, [store = store_, key = own_key()] {
    write_key(*store, key, "");
    write_key(*store, kAskedKey, "");
    return std::string();
  });
}

std::optional<std::string> StatusStore::ask(std::function<std::string()> question) const {
  const auto turn = turns_->next_within(limit_);
  if (!turn) return std::nullopt;
  return ask_within(limit_, [turn, question = std::move(question)] { return question(); });
}

void StatusStore::tell(RankStatus ours) {
  ours.heartbeat = ++heartbeat_;
  ask([store = store_, key = own_key(), ours] {
    if (is_served(store)) write_key(*store, key, ours.to_text());
    return std::string();
  });
}

void StatusStore::answer(RankStatus ours) {
  ours.heartbeat = ++heartbeat_;
  const auto asked = ask([store = store_, key = own_key(), ours, seen = asked_] {
    if (!is_served(store)) return seen;
    const std::vector<uint8_t> bytes = store->get(kAskedKey);
    std::string now(bytes.begin(), bytes.end());
    if (now != seen) write_key(*store, key, ours.to_text());
    return now;
  });
  if (asked) asked_ = *asked;
}

std::optional<std::vector<std::string>> StatusStore::exchange(RankStatus ours) {
  ours.heartbeat = ++heartbeat_;
  return divided(ask([store = store_, keys = keys_, own = own_key(), rank = rank_, ours] {
    if (!is_served(store)) return std::string();
    write_key(*store, own, ours.to_text());
    write_key(*store, kAskedKey, c10::str(rank, "/", ours.heartbeat));
    return joined_texts(*store, keys);
  }));
}

std::optional<std::vector<std::string>> StatusStore::read(const std::vector<int>& ranks) const {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(keys_[static_cast<size_t>(rank)]);
  return divided(ask([store = store_, keys = std::move(keys)] {
    return is_served(store) ? joined_texts(*store, keys) : std::string();
  }));
}

std::string StatusStore::find(int rank) const {
  const auto text = ask([store = store_, key = keys_[static_cast<size_t>(rank)]] {
    if (!is_served(store) || !store->check({key})) return std::string();
    const std::vector<uint8_t> text = store->get(key);
    return std::string(text.begin(), text.end());
  });
  return text.value_or("");
}

}  // namespace zeropage::comm::detail
