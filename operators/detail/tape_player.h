// Runs recorded operators on the CPU, with one real storage for each meta storage in use.
//
// Draws come from generators of its own, so a replay and draws on other threads do not see each
// other; only an operator that can but draw from LibTorch's default generator borrows that.
//
// Lifetime: the tape outlives the player.
// Threads: one.
// Throws c10::Error when an operator does not give what it gave on the meta device.
#pragma once

#include <vector>

#include <ATen/core/stack.h>

#include "operators/detail/replay_plan.h"

namespace zeropage::operators::detail {

class TapePlayer {
 public:
  explicit TapePlayer(const Tape& tape);

  // Runs the step's operator and releases what the step says; what it hands over stays.
  void run(const ReplayStep& step);
  // Gives a storage away; of a captured tensor, a copy.
  c10::Storage take(size_t storage);
  // The state after the steps that ran; one that the plan was asked for.
  const at::Generator& state(size_t number) const;

 private:
  c10::Storage& storage_for(const TensorView& view);
  at::Tensor tensor_for(const TensorView& view);
  void draw(const RecordedOperator& recorded, const ReplayStep& step, torch::jit::Stack& stack);
  void bind_results(const RecordedOperator& recorded, const torch::jit::Stack& stack);
  void bind(const RecordedOperator& recorded, const TensorView& view, const at::Tensor& result);
  bool in_use(const c10::Storage& storage, const RecordedOperator& recorded) const;

  const Tape& tape_;
  std::vector<c10::Storage> storages_;  // by number; empty where nothing is held
  std::vector<at::Generator> states_;   // by number; the constants are the tape's
};

}  // namespace zeropage::operators::detail
