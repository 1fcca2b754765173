// What one rank of a pipeline does at a time: one pass of one micro-batch through one of the rank's chunks of the model.
//
// The model is cut into ranks x chunks stages, in the order of its layers. Stage s is chunk s / ranks of rank s % ranks, so a rank
// with one chunk has the stage of its own number. No torch here: lists of actions are made and simulated by programs without it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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
  std::vector<std::vector<Action>> of_rank;  // [ranks]

  int ranks() const { return static_cast<int>(of_rank.size()); }
  int stages() const { return ranks() * chunks; }
  int stage(int rank, int chunk) const { return chunk * ranks() + rank; }
};

}  // namespace zeropage::parallel
