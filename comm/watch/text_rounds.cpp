#include "comm/watch/text_rounds.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "base/block_checksum.h"
#include "base/exact.h"
#include "comm/watch/store_calls.h"
#include "zeropage/check.h"

namespace zeropage::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The other ranks wait a little longer than rank 0, so that it can tell them who is missing.
constexpr auto kVerdictMargin = milliseconds(5000);
// Ranks out of step find out by themselves, of each other: the first to know waits for the other.
constexpr auto kTimeForOthers = milliseconds(750);
// How long the ranks that are left have to read a text, once one is lost.
constexpr auto kTimeForReaders = milliseconds(2000);
// Between looks whether there still is a rank to wait for.
constexpr auto kBetweenProbes = milliseconds(200);
constexpr auto kNoWait = milliseconds(1);
// How long the store may take to say which texts are there.
constexpr auto kQuickAnswer = milliseconds(1000);
// So many ranks look ten times a second for what is late; more look less often.
constexpr int kRanksThatLookOften = 128;
// Between looks whether all ranks have read.
constexpr auto kFirstReadPause = std::chrono::microseconds(100);
constexpr auto kLongReadPause = std::chrono::microseconds(100'000);
// How long the store may take for what is there.
constexpr auto kRoundTripLimit = milliseconds(30'000);
// TCPStore refuses values of more than 8 MiB.
constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr size_t kMostInline = size_t{64} << 10;
constexpr char kFine = '+';
constexpr char kFailed = '-';

std::string piece_key(const std::string& key, size_t piece) {
  return c10::str(key, "/", piece);
}

size_t pieces_of(size_t bytes) {
  return bytes <= kMostInline ? 0 : (bytes + kPieceBytes - 1) / kPieceBytes;
}

std::string answer_key(const std::string& round) {
  return round + "answer";
}

std::string text_key(const std::string& round, int rank) {
  return round + std::to_string(rank);
}

// What lies under the key itself goes last: the rank that serves the store may end then.
void remove_text(c10d::Store& store, const std::string& key, size_t bytes) {
  for (size_t piece = 0; piece < pieces_of(bytes); ++piece) store.deleteKey(piece_key(key, piece));
  store.deleteKey(key);
}

// Each text, behind its length.
std::string as_one_text(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += c10::str(text.size(), "\n") + text;
  return all;
}

std::vector<std::string> texts_in(std::string_view all) {
  std::vector<std::string> texts;
  while (!all.empty()) {
    size_t bytes = 0;
    const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), bytes);
    TORCH_INTERNAL_ASSERT(error == std::errc());
    all.remove_prefix(static_cast<size_t>(end - all.data()) + 1);
    texts.emplace_back(all.substr(0, bytes));
    all.remove_prefix(bytes);
  }
  return texts;
}

// "1, 2"
std::string listed(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return list;
}

}  // namespace

std::string were_lost(const std::vector<int>& ranks) {
  return c10::str("lost rank ", listed(ranks), "; it has ended or was killed. See its last lines");
}

// What ends a round's waiting before the texts have come.
class TextRounds::Waiting {
 public:
  Waiting(TextRounds& texts, const std::string& topic)
      : texts_(texts),
        wait_(texts.options_.watch->activity(),
              c10::str("texts of \"", topic, "\"", texts.options_.where), texts.options_.deadline) {
  }

  void await(int other) { wait_.await(other); }
  void look() {
    // Who is out of step is lost by our verdict, not by its own.
    if (!verdict_) lost_ = texts_.options_.lost_ranks();
    if (!verdict_ && lost_.empty() && texts_.has_lost_store()) {
      lost_ = {texts_.options_.store_server_name};
    }
    if (verdict_ || is_over()) return;
    verdict_ = wait_.verdict();
    if (verdict_ && verdict_->kind == Verdict::Kind::kOutOfStep) {
      over_at_ = Clock::now() + kTimeForOthers;
    }
  }
  bool is_over() const { return !lost_.empty() || (verdict_ && Clock::now() >= over_at_); }
  const std::vector<int>& lost() const { return lost_; }
  const std::optional<Verdict>& verdict() const { return verdict_; }

 private:
  TextRounds& texts_;
  Activity::TextWait wait_;
  std::vector<int> lost_;
  std::optional<Verdict> verdict_;
  Clock::time_point over_at_;  // once there is a verdict
};

// ---- rounds ----

std::vector<std::string> TextRounds::gather(const std::string& topic, const std::string& text) {
  const std::string round = c10::str("round/", next_round(), "/");
  return texts_in(answer_of(round, topic, text, as_one_text));
}

std::string TextRounds::settle(const std::string& topic, const std::string& text,
                               const Decide& decide) {
  const std::string round = c10::str("settle/", next_round(), "/");
  std::string answer = answer_of(round, topic, text, decide);
  // What follows an answer may be an error, and the end of this process with the store.
  if (options_.rank == 0 && !answer.empty()) wait_until_gone(answer_key(round));
  return answer;
}

std::string TextRounds::settle_difference(const std::string& topic, const std::string& text,
                                          const Decide& decide) {
  const auto bytes = std::as_bytes(std::span(text));
  const std::string hash =
      base::to_hex(base::block_checksum(bytes.data(), static_cast<int64_t>(bytes.size())));
  const std::string answer = settle(topic, hash, [](const std::vector<std::string>& hashes) {
    const bool are_alike = std::all_of(hashes.begin(), hashes.end(),
                                       [&](const auto& other) { return other == hashes.front(); });
    return std::string(are_alike ? "" : "differ");
  });
  return answer.empty() ? answer : settle(topic, text, decide);
}

// An answer is told with kFine before it, what no rank can go on from with kFailed.
std::string TextRounds::answer_of(const std::string& round, const std::string& topic,
                                  const std::string& text, const Decide& decide) {
  const std::string told = options_.rank == 0 ? decide_for_all(round, topic, text, decide)
                                              : ask_for_answer(round, topic, text);
  ZP_CHECK(told.front() == kFine, told.substr(1));
  last_key_ = answer_key(round);
  return told.substr(1);
}

std::string TextRounds::decide_for_all(const std::string& round, const std::string& topic,
                                       const std::string& text, const Decide& decide) {
  std::vector<std::string> texts = {text};
  std::vector<int> missing;
  std::string failure;
  {
    Waiting waiting(*this, topic);
    missing = collect(round, waiting, texts);
    if (!missing.empty()) failure = fail(topic, missing, waiting);
  }
  const std::string told = failure.empty() ? kFine + decide(texts) : kFailed + failure;
  write_text(answer_key(round), told);
  // We are about to throw, and the store may end with us: lets the others read first.
  if (!failure.empty()) {
    wait_until_read(round, options_.size - 1 - static_cast<int64_t>(missing.size()));
  }
  return told;
}

std::string TextRounds::ask_for_answer(const std::string& round, const std::string& topic,
                                       const std::string& text) {
  write_text(text_key(round, options_.rank), text);
  Waiting waiting(*this, topic);
  waiting.await(0);
  std::optional<std::string> told;
  if (const auto heads = read_heads({answer_key(round)}, waiting)) {
    told = text_behind(heads->front(), answer_key(round));
  }
  if (!told) {
    // Rank 0 may have found out first.
    const bool is_alone = waiting.verdict() && waiting.verdict()->kind != Verdict::Kind::kOutOfStep;
    told = read_text(answer_key(round), is_alone ? kVerdictMargin : kBetweenProbes);
  }
  if (!told) return kFailed + fail(topic, {0}, waiting);
  if (told->front() == kFailed) {
    count_readers(round, 1);
  } else {
    leave_round(round, text.size(), told->size());
  }
  return *told;
}

// Adds the texts of ranks 1, 2, ... to `texts`; where some do not come, returns these ranks.
std::vector<int> TextRounds::collect(const std::string& round, Waiting& waiting,
                                     std::vector<std::string>& texts) {
  std::vector<std::string> keys;
  for (int other = 1; other < options_.size; ++other) keys.push_back(text_key(round, other));
  waiting.await(1);
  auto heads = read_heads(keys, waiting);
  if (!heads) {
    std::vector<int> missing = find_absent(keys, keys.size());
    if (!missing.empty()) return missing;
    heads = read_keys(options_.store, keys, kRoundTripLimit, &store_is_gone_);  // came just now
    if (!heads) return {1};
  }
  std::vector<int> missing;
  for (size_t index = 0; index < keys.size(); ++index) {
    auto text = text_behind((*heads)[index], keys[index]);
    if (!text) missing.push_back(static_cast<int>(index) + 1);
    texts.push_back(std::move(text).value_or(""));
  }
  return missing;
}

// What lies under the keys, once it is there; nothing if the waiting is over before.
std::optional<std::vector<std::string>> TextRounds::read_heads(const std::vector<std::string>& keys,
                                                               Waiting& waiting) {
  // The store serves all ranks from one thread.
  LookPauses pauses;
  pauses.longest *= base::div_ceil(options_.size, kRanksThatLookOften);
  auto patience = kBetweenProbes;
  for (;;) {
    auto heads = read_keys(options_.store, keys, waiting.is_over() ? kNoWait : patience,
                           &store_is_gone_, pauses);
    if (heads || waiting.is_over()) return heads;
    if (keys.size() > 1) {
      const std::vector<int> absent = find_absent(keys, /*most=*/1);
      if (!absent.empty()) waiting.await(absent.front());
    }
    waiting.look();
    // Who is late by that much may be so for long.
    pauses.first = pauses.longest;
    patience = std::max(patience, std::chrono::ceil<milliseconds>(pauses.longest));
  }
}

// The first ranks of which the keys, of ranks 1, 2, ..., are not there, found by halving. A store that is silent has no further key.
std::vector<int> TextRounds::find_absent(const std::vector<std::string>& keys, size_t most) {
  std::vector<int> ranks;
  bool is_silent = false;
  const auto there = [&](size_t begin, size_t end) {
    if (is_silent || begin == end) return !is_silent;
    const auto first = keys.begin();
    const auto found = are_there(
        options_.store,
        {first + static_cast<std::ptrdiff_t>(begin), first + static_cast<std::ptrdiff_t>(end)},
        kQuickAnswer, &store_is_gone_);
    is_silent = !found;
    return found.value_or(false);
  };
  for (size_t begin = 0; ranks.size() < most && !is_silent && !there(begin, keys.size());) {
    size_t end = keys.size();
    while (end - begin > 1) {
      const size_t middle = begin + (end - begin) / 2;
      (there(begin, middle) ? begin : end) = middle;
    }
    ranks.push_back(static_cast<int>(begin) + 1);
    ++begin;
  }
  return ranks;
}

// What to throw.
std::string TextRounds::fail(const std::string& topic, const std::vector<int>& missing,
                             const Waiting& waiting) const {
  const std::string why = why_missing(missing, waiting);
  if (options_.fails_kin) options_.watch->fail_group({why, topic + options_.where});
  return c10::str(topic, options_.where, ": ", why);
}

std::string TextRounds::why_missing(const std::vector<int>& missing, const Waiting& waiting) const {
  if (has_lost_store()) return were_lost({options_.store_server_name});
  // A rank that ended because of another has said so.
  for (const int name : waiting.lost()) {
    const int rank = options_.names.find(name, options_.size);
    const auto account = rank >= 0 ? options_.watch->failure_of(rank) : std::nullopt;
    if (account) return account->as_cause_of(name);
  }
  if (!waiting.lost().empty()) return were_lost(waiting.lost());
  if (waiting.verdict() && !waiting.verdict()->words.empty()) return waiting.verdict()->words;
  return c10::str("rank ", listed(options_.names.of(missing)), " did not come within ",
                  in_seconds(options_.deadline), " s; see its output, or raise the deadline");
}

// ---- the store ----

bool TextRounds::has_lost_store() const {
  return options_.store_server_name >= 0 && options_.store_server != options_.rank &&
         (store_is_gone_ || !is_served(options_.store));
}

std::optional<std::string> TextRounds::read(const std::string& key, milliseconds limit) {
  return read_key(options_.store, key, limit, &store_is_gone_);
}

// Under the key itself, once all is there: how many pieces there are, and a short text.
void TextRounds::write_text(const std::string& key, const std::string& text) {
  const size_t pieces = pieces_of(text.size());
  for (size_t piece = 0; piece < pieces; ++piece) {
    write_key(*options_.store, piece_key(key, piece),
              text.substr(piece * kPieceBytes, kPieceBytes));
  }
  write_key(*options_.store, key, c10::str(pieces, "\n", pieces == 0 ? text : std::string()));
}

std::optional<std::string> TextRounds::read_text(const std::string& key, milliseconds limit) {
  const auto head = read(key, limit);
  return head ? text_behind(*head, key) : std::nullopt;
}

// head: what lies under the key itself.
std::optional<std::string> TextRounds::text_behind(const std::string& head,
                                                   const std::string& key) {
  size_t pieces = 0;
  const auto [end, error] = std::from_chars(head.data(), head.data() + head.size(), pieces);
  TORCH_INTERNAL_ASSERT(error == std::errc() && end != head.data() + head.size());
  std::string text = head.substr(static_cast<size_t>(end - head.data()) + 1);
  for (size_t piece = 0; piece < pieces; ++piece) {
    const auto part = read(piece_key(key, piece), kRoundTripLimit);
    if (!part) return std::nullopt;
    text += *part;
  }
  return text;
}

// How many ranks have read the round's answer, with `more` of this call's; 0 where the store is silent.
int64_t TextRounds::count_readers(const std::string& round, int64_t more) {
  const auto count = ask_within(kVerdictMargin, [store = options_.store, round, more] {
    return std::to_string(store->add(round + "read", more));
  });
  return count ? std::stoll(*count) : 0;
}

// This rank has read the answer. Rank 0 had read this rank's text before it wrote that.
void TextRounds::leave_round(const std::string& round, size_t own_bytes, size_t answer_bytes) {
  ask_within(kRoundTripLimit, [store = options_.store, round, own_bytes, answer_bytes,
                               own = text_key(round, options_.rank), others = options_.size - 1] {
    remove_text(*store, own, own_bytes);
    if (store->add(round + "read", 1) == others) {
      store->deleteKey(round + "read");
      remove_text(*store, answer_key(round), answer_bytes);
    }
    return std::string();
  });
}

// For answers with kFailed, which stay in the store.
void TextRounds::wait_until_read(const std::string& round, int64_t readers) {
  auto leave_at = Clock::now() + kVerdictMargin;
  auto pause = kFirstReadPause;
  while (count_readers(round, 0) < readers) {
    leave_sooner_without_ranks(leave_at);
    if (Clock::now() >= leave_at) return;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongReadPause);
  }
}

void TextRounds::wait_until_gone(const std::string& key) {
  auto leave_at = Clock::now() + kVerdictMargin;
  auto pause = kFirstReadPause;
  while (are_there(options_.store, {key}, kRoundTripLimit).value_or(false) &&
         Clock::now() < leave_at) {
    leave_sooner_without_ranks(leave_at);
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongReadPause);
  }
}

// Who is lost reads nothing more; the others have long enough.
void TextRounds::leave_sooner_without_ranks(std::chrono::steady_clock::time_point& leave_at) {
  if (options_.has_ended && options_.has_ended()) {
    leave_at = Clock::now();
    return;
  }
  const auto soon = Clock::now() + kTimeForReaders;
  if (soon < leave_at && !options_.lost_ranks().empty()) leave_at = soon;
}

// Whoever has not read yet would find no store, and take this rank for lost.
void TextRounds::wait_for_readers() {
  if (options_.rank != options_.store_server || last_key_.empty()) return;
  wait_until_gone(last_key_);
}

}  // namespace zeropage::comm::detail
