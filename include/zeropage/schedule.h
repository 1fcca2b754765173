// Schedules of a pipeline (GPipe, 1F1B, interleaved, zero-bubble), and their timelines.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// What one rank of a pipeline does at a time: one pass of one micro-batch through one of the rank's chunks of the model.
//
// The model is cut into ranks x chunks stages, in the order of its layers. Stage s is chunk s / ranks of rank s % ranks, so a rank
// with one chunk has the stage of its own number. No torch here: lists of actions are made and simulated by programs without it.

namespace zeropage::parallel {

enum class ActionKind : uint8_t {
  kForward,
  kBackward,  // both gradients at once
  // The two halves of a backward that is split:
  kInputGradient,   // what the stage before waits for
  kWeightGradient,  // what nobody waits for; the activations are let go after it
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int chunk = 0;  // of the rank, from 0
  int micro_batch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};

// "forward", "backward", "input gradient", "weight gradient".
std::string_view name(ActionKind kind);

// "forward of micro-batch 3", with ", chunk 1" where a rank has several chunks.
std::string describe(const Action& action, int chunks);

// What every rank of a pipeline does in one step, in order.
struct ActionLists {
  int chunks = 1;  // of each rank
  int micro_batches = 1;
  std::vector<std::vector<Action>> of_rank = {};  // [ranks]

  int ranks() const { return static_cast<int>(of_rank.size()); }
  int stages() const { return ranks() * chunks; }
  int stage(int rank, int chunk) const { return chunk * ranks() + rank; }
};

// The order in which each rank of a pipeline runs its forwards and backwards. A schedule makes lists of actions; the same lists are
// simulated (simulation.h), checked (order.h), drawn (`zp schedule`) and run.
//
// Schedules are constant and may be used by any thread. Errors are std::invalid_argument.
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

// When the ranks of a pipeline did what: simulated, or measured in a run.
struct TimedAction {
  Action action;
  double begin_s = 0;  // since the step began
  double end_s = 0;

  friend bool operator==(const TimedAction&, const TimedAction&) = default;
};

using Timeline = std::vector<std::vector<TimedAction>>;  // [ranks][actions], in order

// From 0 to the end of the last action.
double makespan_s(const Timeline& timeline);

// The part of the ranks' time until then in which they do nothing: 0 to 1. Zero for a step without actions.
double bubble_fraction(const Timeline& timeline);

// What an action of each kind takes on each rank, on average, [ranks].
std::vector<std::map<ActionKind, double>> mean_seconds(const Timeline& timeline);

// The most activations that each rank holds at once, [ranks], in micro-batches: what a chunk holds of one counts 1 / chunks. They are
// held from a forward to the end of its backward, or of its weight gradient. The order alone decides.
std::vector<double> peak_activations(const ActionLists& lists);

// A step's timeline as JSON: what a run writes of its actions, and `zp schedule --times` reads.
//
//   {"schedule": "1f1b", "chunks": 1,
//    "ranks": [[{"kind": "forward", "chunk": 0, "micro_batch": 0, "begin_s": 0.001, "end_s": 0.004}, ...], ...]}
//
// One list for each rank of the pipeline, in the order of its actions; kinds are name(ActionKind). All ranks' seconds are since one moment.
struct TimedStep {
  std::string schedule = {};  // its name
  int chunks = 1;             // of each rank
  Timeline timeline;
};

std::string to_json(const TimedStep& step);

// Throws std::invalid_argument with what was expected and the place, if the text is something else. who: the file, for the error.
TimedStep timed_step(const std::string& json, const std::string& who);

// Throws std::invalid_argument unless the step did these actions in this order, one after the other on each rank.
void check_times(const TimedStep& step, const ActionLists& lists, const std::string& who);

}  // namespace zeropage::parallel
