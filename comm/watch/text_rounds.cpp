#include "comm/watch/text_rounds.h"

#include <algorithm>
#include <charconv>
#include <thread>
#include <utility>

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

}  // namespace

std::string were_lost(const std::vector<int>& ranks) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return c10::str("lost rank ", list, "; it has ended or was killed. See its last lines");
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
  write_text(round + std::to_string(options_.rank), text);
  Waiting waiting(*this, topic);
  std::vector<std::string> texts;
  std::string missing;
  int64_t present = 0;
  for (int other = 0; other < options_.size; ++other) {
    auto found =
        other == options_.rank ? text : read_from(other, round + std::to_string(other), waiting);
    if (found) {
      ++present;
    } else {
      missing += (missing.empty() ? "" : ", ") + std::to_string(options_.names[other]);
    }
    texts.push_back(std::move(found).value_or(""));
  }
  if (missing.empty()) {
    note_gathered(round, texts);
    return texts;
  }
  if (!has_lost_store()) {
    count_readers(round, 1);
    // We are about to throw, and the store may end with us: lets the others read first.
    if (options_.rank == options_.store_server) wait_until_read(round, present);
  }
  ZP_THROW(fail(topic, missing, waiting));
}

// An answer is told with kFine before it, what no rank can go on from with kFailed.
std::string TextRounds::settle(const std::string& topic, const std::string& text,
                               const Decide& decide) {
  const std::string round = c10::str("settle/", next_round(), "/");
  const std::string told = options_.rank == 0 ? decide_for_all(round, topic, text, decide)
                                              : ask_for_answer(round, topic, text);
  ZP_CHECK(told.front() == kFine, told.substr(1));
  last_key_ = answer_key(round);
  return told.substr(1);
}

// Only rank 0 reads all texts: N messages, not N squared.
std::string TextRounds::decide_for_all(const std::string& round, const std::string& topic,
                                       const std::string& text, const Decide& decide) {
  std::vector<std::string> texts = {text};
  std::string missing;
  std::string failure;
  {
    Waiting waiting(*this, topic);
    for (int other = 1; other < options_.size; ++other) {
      const std::string key = round + std::to_string(other);
      auto found = read_from(other, key, waiting);
      if (found) {
        remove_text(key, found->size());
      } else {
        missing += (missing.empty() ? "" : ", ") + std::to_string(options_.names[other]);
      }
      texts.push_back(std::move(found).value_or(""));
    }
    if (!missing.empty()) failure = fail(topic, missing, waiting);
  }
  for (const auto& [earlier, bytes] : std::exchange(unread_, {})) remove_answer(earlier, bytes);
  const bool fine = failure.empty();
  const std::string told = fine ? kFine + decide(texts) : kFailed + failure;
  write_text(answer_key(round), told);
  const auto gone = std::count(missing.begin(), missing.end(), ',') + (missing.empty() ? 0 : 1);
  // What follows an answer may be an error, and the end of this process with the store.
  if (told.size() > 1) {
    if (!wait_until_read(round, options_.size - 1 - gone)) {
      unread_.emplace_back(round, told.size());
    } else if (fine) {
      remove_answer(round, told.size());
    }
  }
  return told;
}

std::string TextRounds::ask_for_answer(const std::string& round, const std::string& topic,
                                       const std::string& text) {
  write_text(round + std::to_string(options_.rank), text);
  Waiting waiting(*this, topic);
  auto told = read_from(0, answer_key(round), waiting);
  if (!told) {
    // Rank 0 may have found out first.
    const bool is_alone = waiting.verdict() && waiting.verdict()->kind != Verdict::Kind::kOutOfStep;
    told = read_text(answer_key(round), is_alone ? kVerdictMargin : kBetweenProbes);
  }
  if (!told) return kFailed + fail(topic, std::to_string(options_.names[0]), waiting);
  const int64_t readers = count_readers(round, 1);
  // Rank 0 does not wait for the readers of an answer that has no words.
  if (told->size() == 1 && readers == options_.size - 1) remove_answer(round, told->size());
  return *told;
}

// What to throw.
std::string TextRounds::fail(const std::string& topic, const std::string& missing,
                             const Waiting& waiting) const {
  const std::string why = why_missing(missing, waiting);
  if (options_.fails_kin) options_.watch->fail_group({why, topic + options_.where});
  return c10::str(topic, options_.where, ": ", why);
}

std::string TextRounds::why_missing(const std::string& missing, const Waiting& waiting) const {
  if (has_lost_store()) return were_lost({options_.store_server_name});
  // A rank that ended because of another has said so.
  for (const int name : waiting.lost()) {
    const int rank = options_.names.find(name, options_.size);
    const auto account = rank >= 0 ? options_.watch->failure_of(rank) : std::nullopt;
    if (account) return account->as_cause_of(name);
  }
  if (!waiting.lost().empty()) return were_lost(waiting.lost());
  if (waiting.verdict() && !waiting.verdict()->words.empty()) return waiting.verdict()->words;
  return c10::str("rank ", missing, " did not come within ", in_seconds(options_.deadline),
                  " s; see its output, or raise the deadline");
}

// ---- the store ----

bool TextRounds::has_lost_store() const {
  return options_.store_server_name >= 0 && options_.store_server != options_.rank &&
         (store_is_gone_ || !is_served(options_.store));
}

std::optional<std::string> TextRounds::read(const std::string& key, milliseconds limit) {
  return read_key(options_.store, key, limit, &store_is_gone_);
}

std::optional<std::string> TextRounds::read_from(int other, const std::string& key,
                                                 Waiting& waiting) {
  waiting.await(other);
  for (;;) {
    auto found = read_text(key, waiting.is_over() ? kNoWait : kBetweenProbes);
    if (found || waiting.is_over()) return found;
    waiting.look();
  }
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
  auto head = read(key, limit);
  if (!head) return std::nullopt;
  size_t pieces = 0;
  const auto [end, error] = std::from_chars(head->data(), head->data() + head->size(), pieces);
  TORCH_INTERNAL_ASSERT(error == std::errc() && end != head->data() + head->size());
  std::string text = head->substr(static_cast<size_t>(end - head->data()) + 1);
  for (size_t piece = 0; piece < pieces; ++piece) {
    const auto part = read(piece_key(key, piece), kRoundTripLimit);
    if (!part) return std::nullopt;
    text += *part;
  }
  return text;
}

void TextRounds::remove_text(const std::string& key, size_t bytes) {
  ask_within(kRoundTripLimit, [store = options_.store, key, pieces = pieces_of(bytes)] {
    store->deleteKey(key);
    for (size_t piece = 0; piece < pieces; ++piece) store->deleteKey(piece_key(key, piece));
    return std::string();
  });
}

// How many ranks have read the round's answer, with `more` of this call's; 0 where the store is silent.
int64_t TextRounds::count_readers(const std::string& round, int64_t more) {
  const auto count = ask_within(kVerdictMargin, [store = options_.store, round, more] {
    return std::to_string(store->add(round + "read", more));
  });
  return count ? std::stoll(*count) : 0;
}

bool TextRounds::wait_until_read(const std::string& round, int64_t readers) {
  auto leave_at = Clock::now() + kVerdictMargin;
  auto pause = kFirstReadPause;
  while (count_readers(round, 0) < readers) {
    leave_sooner_without_ranks(leave_at);
    if (Clock::now() > leave_at) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongReadPause);
  }
  return true;
}

// Who is lost reads nothing more; the others have long enough.
void TextRounds::leave_sooner_without_ranks(std::chrono::steady_clock::time_point& leave_at) {
  const auto soon = Clock::now() + kTimeForReaders;
  if (soon < leave_at && !options_.lost_ranks().empty()) leave_at = soon;
}

void TextRounds::note_gathered(const std::string& round, const std::vector<std::string>& texts) {
  last_key_ = round + std::to_string(options_.rank);
  if (count_readers(round, 1) < options_.size) return;
  remove_text(round + "read", 0);
  // That of the rank which serves the store comes last: it ends once its text is gone.
  const int last = std::max(options_.store_server, 0);
  for (int rank = 0; rank < options_.size; ++rank) {
    const int removed = (last + 1 + rank) % options_.size;
    remove_text(round + std::to_string(removed), texts[static_cast<size_t>(removed)].size());
  }
}

// Whoever has not read yet would find no store, and take this rank for lost.
void TextRounds::wait_for_readers() {
  if (options_.rank != options_.store_server || last_key_.empty()) return;
  auto leave_at = Clock::now() + kVerdictMargin;
  const auto is_there = [&] {
    const auto found = ask_within(kRoundTripLimit, [store = options_.store, key = last_key_] {
      return std::string(store->check({key}) ? "yes" : "no");
    });
    return found == "yes";
  };
  auto pause = kFirstReadPause;
  while (is_there() && Clock::now() < leave_at) {
    leave_sooner_without_ranks(leave_at);
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongReadPause);
  }
}

void TextRounds::remove_answer(const std::string& round, size_t bytes) {
  remove_text(answer_key(round), bytes);
  remove_text(round + "read", 0);
}

}  // namespace zeropage::comm::detail
