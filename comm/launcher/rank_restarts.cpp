#include "comm/launcher/rank_restarts.h"

#include <utility>

namespace zeropage::comm::detail {
namespace {

// A rank whose process ends is the cause, though others may have noticed before the launcher does.
constexpr int64_t kNanosecondsForEnds = 200'000'000;

}  // namespace

RankRestarts::RankRestarts(const LaunchOptions& options, int port,
                           std::function<void(const std::string& text)> say)
    : grace_(options.grace),
      say_(std::move(say)),
      generations_(Generations::create(options.ranks, options.restarts, port)),
      copies_(options.copies_in) {
  for (int rank = 0; rank < options.ranks; ++rank) generations_.join(rank, 0);
}

// A rank that has finished is not there to meet the others.
bool RankRestarts::can_begin() const {
  for (int rank = 0; rank < generations_.ranks(); ++rank) {
    if (generations_.has_finished(rank)) return false;
  }
  return generations_.current() < generations_.restarts() && !generations_.is_closed();
}

bool RankRestarts::takes(int rank, const RankEnd& end) {
  if (!end.failed()) {
    generations_.finish(rank);
    return false;
  }
  const int current = generations_.current();
  if (generations_.joined(rank) < current) {
    generations_.join(rank, current);
    return !generations_.is_closed();
  }
  if (!can_begin()) return false;
  begin(end.signal != 0 ? BeginCause::kSignal : BeginCause::kExit,
        end.signal != 0 ? end.signal : end.exit_code, rank, monotonic_nanoseconds());
  return true;
}

void RankRestarts::begin(BeginCause cause, int detail, int rank, int64_t failed_at) {
  store_ = bind_free_port();
  const GenerationBegin next{
      .cause = cause, .detail = detail, .rank = rank, .port = store_.port, .failed_at = failed_at};
  generations_.begin(next);
  // What is started for this generation is in it.
  if (cause != BeginCause::kLeft) generations_.join(rank, generations_.current());
  kill_at_ = Clock::now() + grace_;
  say_(next.words() + ": start " + std::to_string(generations_.current()) + " of " +
       std::to_string(generations_.restarts()) + " of all ranks from their last copy");
}

std::optional<int> RankRestarts::first_to_leave() const {
  std::optional<int> first;
  for (int rank = 0; rank < generations_.ranks(); ++rank) {
    if (generations_.left(rank) < generations_.current()) continue;
    if (!first || generations_.left_at(rank) < generations_.left_at(*first)) first = rank;
  }
  return first;
}

std::vector<int> RankRestarts::look() {
  if (const auto first = first_to_leave()) {
    const int64_t left_at = generations_.left_at(*first);
    if (!can_begin()) {
      close();
    } else if (monotonic_nanoseconds() - left_at > kNanosecondsForEnds) {
      // Whoever fails of itself may need longer to leave than those that lose it.
      const int blamed = generations_.blamed(*first);
      begin(BeginCause::kLeft, 0, blamed >= 0 ? blamed : *first, left_at);
    }
  }
  if (!kill_at_ || Clock::now() < *kill_at_) return {};
  kill_at_.reset();
  std::vector<int> late;
  for (int rank = 0; rank < generations_.ranks(); ++rank) {
    const int joined = generations_.joined(rank);
    if (generations_.has_finished(rank)) continue;
    if (joined < generations_.current() && generations_.left(rank) < joined) late.push_back(rank);
  }
  return late;
}

void RankRestarts::complete(RankEnvironment& environment) const {
  environment.generations = generations_.path();
  environment.copies = copies_.path();
  if (generations_.current() == 0) return;
  environment.master_port = store_.port;
  environment.store_socket = -1;
}

}  // namespace zeropage::comm::detail
