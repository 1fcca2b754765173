// In which order each rank of a pipeline runs its forwards and backwards. A schedule makes lists of actions; the same lists are
// simulated (simulation.h), checked (order.h), drawn (`zp schedule`) and run.
//
// Schedules are constant and may be used by any thread. Errors are std::invalid_argument.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/schedule/action.h"

namespace zeropage::parallel {

enum class ScheduleKind : uint8_t {
  kGPipe,
  kOneForwardOneBackward,
  kInterleaved,
  kZeroBubble,
};

class Schedule {
 public:
  virtual ~Schedule() = default;

  // "gpipe", "1f1b", "interleaved" or "zero-bubble".
  virtual std::string_view name() const = 0;
  // The pieces of the model that each rank has.
  virtual int chunks() const { return 1; }
  // Whether input and weight gradients are computed apart, so that a stage must be able to.
  virtual bool splits_backward() const { return false; }

  // What each rank does in a step. Throws with the schedule's name, what it needs, and what to change, where these numbers make no
  // sense for it.
  ActionLists actions(int pipeline_ranks, int micro_batches) const;

 private:
  // Why the schedule cannot run with these numbers, each at least 1; empty where it can.
  virtual std::string refusal(int ranks, int micro_batches) const = 0;
  virtual std::vector<Action> actions_of(int rank, int ranks, int micro_batches) const = 0;
};

// All micro-batches forwards, then all backwards (Huang et al., "GPipe", 2019). Holds the activations of all of them. Takes any number
// of micro-batches; with one, the ranks wait for each other.
class GPipe : public Schedule {
 public:
  std::string_view name() const override { return "gpipe"; }

 private:
  std::string refusal(int ranks, int micro_batches) const override;
  std::vector<Action> actions_of(int rank, int ranks, int micro_batches) const override;
};

// A backward as soon as there is one, then alternately one forward and one backward (Narayanan et al., "PipeDream", 2019; without
// several versions of the weights, 2021). Rank r of P holds the activations of at most P - r micro-batches. Needs at least P.
class OneForwardOneBackward : public Schedule {
 public:
  std::string_view name() const override { return "1f1b"; }

 private:
  std::string refusal(int ranks, int micro_batches) const override;
  std::vector<Action> actions_of(int rank, int ranks, int micro_batches) const override;
};

// The same over several chunks a rank, which divides the bubble by their number and multiplies the messages by it (Narayanan et al.,
// "Efficient Large-Scale Language Model Training on GPU Clusters", 2021). Micro-batches come in groups of as many as there are ranks.
class Interleaved : public Schedule {
 public:
  // chunks: of each rank; at least 2, since with one it is 1f1b.
  explicit Interleaved(int chunks);

  std::string_view name() const override { return "interleaved"; }
  int chunks() const override { return chunks_; }

 private:
  std::string refusal(int ranks, int micro_batches) const override;
  std::vector<Action> actions_of(int rank, int ranks, int micro_batches) const override;

  int chunks_;
};

// 1f1b whose weight gradients wait until a rank would be idle: ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023. Every
// rank holds at most as many micro-batches as rank 0 does, which are P.
class ZeroBubble : public Schedule {
 public:
  std::string_view name() const override { return "zero-bubble"; }
  bool splits_backward() const override { return true; }

 private:
  std::string refusal(int ranks, int micro_batches) const override;
  std::vector<Action> actions_of(int rank, int ranks, int micro_batches) const override;
};

// chunks: 1 for all but kInterleaved, which needs 2 or more; anything else is refused.
std::unique_ptr<Schedule> make_schedule(ScheduleKind kind, int chunks = 1);

}  // namespace zeropage::parallel
