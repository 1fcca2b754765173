// The parts of a save: this rank's tensors, and what the ranks do together.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <vector>

#include "saving/detail/state_plan.h"
#include "saving/detail/state_sinks.h"
#include "state/block_checksums.h"
#include "state/run_token.h"
#include "zeropage/state_folder.h"
#include "zeropage/world.h"

namespace zeropage::saving {

// What this rank writes of a file; rank 0 writes headers, buffers and steps too.
void collect_weights(const ModelRef& model, const StatePlan& plan, StateSink& sink);
void collect_optimizer(const ModelRef& model, ShardedOptimizer& optimizer, const StatePlan& plan,
                       StateSink& sink);

// A state that ranks put together: created by all, written by all, committed by all or by none.
// Threads: one of each rank.
class SharedSave {
 public:
  // texts: beside the world that trains. token: rank 0's, of the run that the folder belongs to, which must
  // outlive this; null: whoever saves may.
  SharedSave(comm::World texts, std::filesystem::path target,
             const state::RunToken* token = nullptr);
  // What was not committed goes.
  ~SharedSave();

  // The files are there, in their sizes. Returns their folder. Collective.
  std::filesystem::path create(const StatePlan& plan);

  struct Pieces {
    std::vector<state::ChecksumPiece> weights;
    std::vector<state::ChecksumPiece> optimizer;
  };
  // error: of this rank. Collective.
  SavedReport commit(const StatePlan& plan, const Pieces& pieces, const std::exception_ptr& error,
                     bool update_latest, const state::Keep& keep);

 private:
  const comm::World texts_;
  const std::filesystem::path target_;
  const state::RunToken* const token_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::unique_ptr<state::NewState> state_;  // rank 0's
};

// What was planned, from the model to the disk. Collective.
SavedReport save_now(SharedSave& save, const StatePlan& plan, const ModelRef& model,
                     ShardedOptimizer* optimizer, const SaveOptions& options,
                     const state::Keep& keep);

}  // namespace zeropage::saving
