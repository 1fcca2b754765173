#include "zeropage/schedule.h"

#include <algorithm>
#include <stdexcept>

namespace zeropage::parallel {
namespace {

using Kind = ActionKind;

std::string schedule_words(std::string_view name) {
  return "schedule " + std::string(name) + ": ";
}

[[noreturn]] void refuse(std::string_view name, const std::string& words) {
  throw std::invalid_argument(schedule_words(name) + words);
}

// Schedules that begin backwards before all forwards are done keep every rank busy only with a micro-batch for each.
std::string needs_one_for_each_rank(int ranks, int micro_batches) {
  if (micro_batches >= ranks) return "";
  return "expected at least " + std::to_string(ranks) +
         " micro-batches, one for each rank of the pipeline, got " + std::to_string(micro_batches) +
         "; cut the batch into more micro-batches, use fewer ranks, or take gpipe";
}

// The forwards that a rank does before its first backward, so that the gradient of the first micro-batch is back by then.
int warm_up_forwards(int rank, int ranks) {
  return ranks - 1 - rank;
}

}  // namespace

ActionLists Schedule::actions(int pipeline_ranks, int micro_batches) const {
  if (pipeline_ranks < 1) {
    refuse(name(), "expected at least 1 rank, got " + std::to_string(pipeline_ranks));
  }
  if (micro_batches < 1) {
    refuse(name(), "expected at least 1 micro-batch, got " + std::to_string(micro_batches));
  }
  const std::string why_not = refusal(pipeline_ranks, micro_batches);
  if (!why_not.empty()) refuse(name(), why_not);
  ActionLists lists{chunks(), micro_batches, {}};
  for (int rank = 0; rank < pipeline_ranks; ++rank) {
    lists.of_rank.push_back(actions_of(rank, pipeline_ranks, micro_batches));
  }
  return lists;
}

std::string GPipe::refusal(int /*ranks*/, int /*micro_batches*/) const {
  return "";
}

std::vector<Action> GPipe::actions_of(int /*rank*/, int /*ranks*/, int micro_batches) const {
  std::vector<Action> actions;
  for (int m = 0; m < micro_batches; ++m) actions.push_back({Kind::kForward, 0, m});
  for (int m = 0; m < micro_batches; ++m) actions.push_back({Kind::kBackward, 0, m});
  return actions;
}

std::string OneForwardOneBackward::refusal(int ranks, int micro_batches) const {
  return needs_one_for_each_rank(ranks, micro_batches);
}

std::vector<Action> OneForwardOneBackward::actions_of(int rank, int ranks,
                                                      int micro_batches) const {
  const int ahead = warm_up_forwards(rank, ranks);
  std::vector<Action> actions;
  for (int m = 0; m < ahead; ++m) actions.push_back({Kind::kForward, 0, m});
  for (int m = 0; m < micro_batches; ++m) {
    if (m + ahead < micro_batches) actions.push_back({Kind::kForward, 0, m + ahead});
    actions.push_back({Kind::kBackward, 0, m});
  }
  return actions;
}

Interleaved::Interleaved(int chunks) : chunks_(chunks) {
  if (chunks < 2) {
    refuse(name(), "expected at least 2 chunks of the model on each rank, got " +
                       std::to_string(chunks) + "; with one chunk take 1f1b");
  }
}

std::string Interleaved::refusal(int ranks, int micro_batches) const {
  if (micro_batches % ranks == 0) return "";
  return "expected micro-batches in groups of " + std::to_string(ranks) +
         ", as many as there are ranks, got " + std::to_string(micro_batches) +
         "; take a multiple, or 1f1b";
}

std::vector<Action> Interleaved::actions_of(int rank, int ranks, int micro_batches) const {
  // A group of `ranks` micro-batches passes the first chunk, then the second and so on; then the next group. Backwards the chunks come
  // in the opposite order.
  const auto nth = [&](Kind kind, int n) {
    const int group = n / (ranks * chunks_);
    const int chunk = n / ranks % chunks_;
    return Action{kind, kind == Kind::kForward ? chunk : chunks_ - 1 - chunk,
                  group * ranks + n % ranks};
  };
  const int total = micro_batches * chunks_;
  const int ahead = std::min(total, 2 * warm_up_forwards(rank, ranks) + (chunks_ - 1) * ranks);
  std::vector<Action> actions;
  for (int n = 0; n < ahead; ++n) actions.push_back(nth(Kind::kForward, n));
  for (int n = 0; n < total; ++n) {
    if (n + ahead < total) actions.push_back(nth(Kind::kForward, n + ahead));
    actions.push_back(nth(Kind::kBackward, n));
  }
  return actions;
}

std::string ZeroBubble::refusal(int ranks, int micro_batches) const {
  return needs_one_for_each_rank(ranks, micro_batches);
}

std::vector<Action> ZeroBubble::actions_of(int rank, int ranks, int micro_batches) const {
  // In 1f1b rank r holds r micro-batches fewer than rank 0, so that many weight gradients may wait.
  const int ahead = warm_up_forwards(rank, ranks);
  const int waiting = rank;
  std::vector<Action> actions;
  for (int m = 0; m < ahead; ++m) actions.push_back({Kind::kForward, 0, m});
  for (int m = 0; m < micro_batches; ++m) {
    if (m + ahead < micro_batches) actions.push_back({Kind::kForward, 0, m + ahead});
    actions.push_back({Kind::kInputGradient, 0, m});
    if (m >= waiting) actions.push_back({Kind::kWeightGradient, 0, m - waiting});
  }
  for (int m = std::max(0, micro_batches - waiting); m < micro_batches; ++m) {
    actions.push_back({Kind::kWeightGradient, 0, m});
  }
  return actions;
}

std::unique_ptr<Schedule> make_schedule(ScheduleKind kind, int chunks) {
  if (kind == ScheduleKind::kInterleaved) return std::make_unique<Interleaved>(chunks);
  std::unique_ptr<Schedule> schedule;
  switch (kind) {
    case ScheduleKind::kGPipe:
      schedule = std::make_unique<GPipe>();
      break;
    case ScheduleKind::kZeroBubble:
      schedule = std::make_unique<ZeroBubble>();
      break;
    case ScheduleKind::kOneForwardOneBackward:
    case ScheduleKind::kInterleaved:
      schedule = std::make_unique<OneForwardOneBackward>();
      break;
  }
  if (chunks != 1) {
    refuse(schedule->name(), "expected 1 chunk of the model on each rank, got " +
                                 std::to_string(chunks) + "; several chunks need interleaved");
  }
  return schedule;
}

}  // namespace zeropage::parallel
