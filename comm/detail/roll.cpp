#include "comm/detail/roll.h"

#include <algorithm>
#include <utility>

namespace zeropage::comm::detail {
namespace {

// An error names this many ranks.
constexpr int kMostRanks = 8;

}  // namespace

std::string tenths_of_seconds(std::chrono::steady_clock::duration time) {
  const auto whole = std::chrono::duration_cast<std::chrono::milliseconds>(time);
  return c10::str(static_cast<double>(whole.count() / 100) / 10.0, " s");
}

void Roll::listen(int other, const std::string& text) {
  auto standing = Standing::parse(text);
  if (!standing) return;
  Heard& heard = heard_[static_cast<size_t>(other)];
  if (heard.standing && heard.standing->beat != standing->beat) heard.at = Clock::now();
  if (heard.period != ours_.waits) {
    heard.period = ours_.waits;
    heard.first_beat = standing->beat;
  }
  heard.standing = std::move(standing);
}

bool Roll::beats(int other) const {
  const Heard& heard = of(other);
  return heard.standing && heard.period == ours_.waits &&
         heard.standing->beat != heard.first_beat &&
         heard.standing->where != Standing::Where::kLeft;
}

bool Roll::all_know() const {
  for (int other = 0; other < size(); ++other) {
    const auto& standing = of(other).standing;
    if (beats(other) && !standing->is_outside() && standing->account.empty()) return false;
  }
  return true;
}

std::string Roll::describe(int other) const {
  const Heard& heard = of(other);
  const std::string rank = c10::str("Rank ", other);
  if (heard.standing && heard.standing->where == Standing::Where::kLeft) return rank + " has ended";
  if (!beats(other)) {
    if (!ours_.last_shared) return rank + " has not been heard of yet";
    return c10::str(rank, " was last heard in ", ours_.last_shared->describe(), ", ",
                    tenths_of_seconds(Clock::now() - ours_.last_shared_at), " ago");
  }
  const Standing& theirs = *heard.standing;
  const auto gone = Clock::now() - heard.at;
  const bool silent = gone > std::max(deadline_ / 2, std::chrono::milliseconds(1000));
  const std::string when = silent ? ", silent for " + tenths_of_seconds(gone) : "";
  switch (theirs.where) {
    case Standing::Where::kInTexts:
      return c10::str(rank, " waits for ", theirs.words, when);
    case Standing::Where::kOutside:
      return c10::str(rank, theirs.words.empty() ? " has called nothing yet" : " was last in ",
                      theirs.words, when);
    case Standing::Where::kInCall:
    case Standing::Where::kOnDevice:
    case Standing::Where::kLeft:
      break;
  }
  return c10::str(rank, silent ? " stood at " : " stands at ", theirs.call.describe(), when);
}

std::string Roll::describe_others() const {
  std::string text;
  int named = 0;
  for (int other = 0; other < size(); ++other) {
    if (other == rank_) continue;
    if (++named > kMostRanks) return text + " ...";
    text += c10::str(text.empty() ? "" : ". ", describe(other));
  }
  return text;
}

}  // namespace zeropage::comm::detail
