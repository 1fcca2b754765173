#include "comm/watch/peer_statuses.h"

#include <algorithm>
#include <utility>

namespace zeropage::comm::detail {
namespace {

// An error names this many ranks.
constexpr int kMostRanks = 8;

}  // namespace

std::string tenths_of_seconds(std::chrono::steady_clock::duration time) {
  const auto whole = time / std::chrono::milliseconds(100);
  return c10::str(static_cast<double>(whole) / 10.0, " s");
}

void PeerStatuses::listen(int other, const std::string& text) {
  auto status = RankStatus::parse(text);
  if (!status) return;
  PeerStatus& heard = statuses_[static_cast<size_t>(other)];
  if (heard.status && heard.status->heartbeat != status->heartbeat) heard.at = Clock::now();
  if (heard.period != ours_.waits) {
    heard.period = ours_.waits;
    heard.first_heartbeat = status->heartbeat;
  }
  heard.status = std::move(status);
}

bool PeerStatuses::has_heartbeat(int other) const {
  const PeerStatus& heard = of(other);
  return heard.status && heard.period == ours_.waits &&
         heard.status->heartbeat != heard.first_heartbeat &&
         heard.status->where != RankStatus::Where::kLeft;
}

bool PeerStatuses::has_failed(int other) const {
  const PeerStatus& heard = of(other);
  return heard.status && heard.period == ours_.waits && !heard.status->account.empty();
}

bool PeerStatuses::all_will_end() const {
  for (int other = 0; other < size(); ++other) {
    const auto& status = of(other).status;
    if (has_heartbeat(other) && !status->is_outside() && status->account.empty()) return false;
  }
  return true;
}

std::string PeerStatuses::describe(int other) const {
  const PeerStatus& heard = of(other);
  const std::string rank = c10::str("Rank ", names_[other]);
  if (heard.status && heard.status->where == RankStatus::Where::kLeft) return rank + " has ended";
  if (!has_heartbeat(other)) {
    if (!ours_.last_shared) return rank + " has not been heard of yet";
    return c10::str(rank, " was last heard in ", ours_.last_shared->describe(), ", ",
                    tenths_of_seconds(Clock::now() - ours_.last_shared_at), " ago");
  }
  const RankStatus& theirs = *heard.status;
  const auto gone = Clock::now() - heard.at;
  const bool silent = gone > std::max(deadline_ / 2, std::chrono::milliseconds(1000));
  const std::string when = silent ? ", silent for " + tenths_of_seconds(gone) : "";
  switch (theirs.where) {
    case RankStatus::Where::kInTexts:
      return c10::str(rank, " waits for ", theirs.words, when);
    case RankStatus::Where::kElsewhere:
      return c10::str(rank, silent ? " stood at " : " stands at ", theirs.words, when);
    case RankStatus::Where::kOutside:
      return c10::str(rank, theirs.words.empty() ? " has called nothing yet" : " was last in ",
                      theirs.words, when);
    case RankStatus::Where::kInCall:
    case RankStatus::Where::kOnDevice:
    case RankStatus::Where::kLeft:
      break;
  }
  return c10::str(rank, silent ? " stood at " : " stands at ", theirs.call.describe(), when);
}

std::string PeerStatuses::describe_others() const {
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
