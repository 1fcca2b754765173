// Training that goes on when a rank dies: `survive()` runs a training loop, and runs it again from a copy of its state.
//
//   zeropage::survive([&](zeropage::World& world, zeropage::SurvivingRun& run) {
//     zeropage::DistributedDataParallel<Gpt> model(Gpt(config), world, options);
//     zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(3e-4));
//     zeropage::RunState state;
//     run.resume(model, optimizer, state);  // back to the newest copy; in the first start there is none
//     while (state.step < steps) {
//       ...  // batch number state.step
//       optimizer.step();
//       ++state.step;
//       run.end_step(model, optimizer, state);
//     }
//   });
//
//   zp run --restarts 5 -n 4 -- ./train
//
// When a rank is killed, ends, or throws out of the loop, the others leave the loop by an exception within seconds: all that it made is
// destroyed, and they keep their processes. The launcher starts the processes that have ended. All call the loop again, which
// goes back to the newest copy: the run has the bits of one that was not interrupted, if the loop's batches follow from the RunState
// and generators of random numbers are LibTorch's.
//
// Copies are states as StateSaver writes them, beside training, in a folder in the host's memory. Up to two are there at once: at fp32
// and Adam 24 bytes a parameter on the host, and 12 more that each rank owns while it copies. They live as long as the launcher.
// A lost host, or a killed launcher, is not survived by them; save_state() to a disk is still needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zeropage/recompute.h"
#include "zeropage/saving.h"
#include "zeropage/world.h"

namespace zeropage {
namespace saving {
class SurvivingLoop;
}  // namespace saving

struct SurvivalOptions {
  // Steps from one copy to the next. At least 1. The step after which one is made waits for a copy of what the rank owns; the
  // one before must have been written.
  int64_t copy_every = 10;
  // Where copies lie; a folder that all ranks see, and this run's alone. Default: one in the host's memory that `zp run --restarts` makes. With a
  // folder on a disk the loop also goes on where a former launch ended.
  std::filesystem::path folder = {};
  // The worlds in which the loop runs.
  comm::WorldOptions world = {};
  // How many rungs the loop has below the first for a step that does not fit the memory (SurvivingRun::memory_rung()).
  // 0: to run out of memory is a failure like any other.
  int memory_rungs = 0;
};

// What a step does on a rung to take less memory than on the one above it. Each takes more time.
struct MemoryRung {
  checkpointing::RecomputeOptions recompute = checkpointing::RecomputeOptions::nothing();
  // Into how many equal parts each micro-batch is cut. An Accumulator's micro-steps are as many times more.
  int64_t parts = 1;
  // "cheap operators are computed again"
  std::string words = {};
};

// A ladder for most loops. 0 keeps all, 1 computes cheap operators again, 2 all of each block but its input, where find_blocks()
// finds blocks (zeropage/recompute.h); each further one cuts micro-batches into twice as many parts. Recompute keeps the bits of a
// step; parts have the same mean gradient but for the order of its sum. Throws where rung is below 0 or above 30.
MemoryRung memory_rung(const torch::nn::Module& module, int rung);

// Why the loop was called again, and how long that took.
struct Restart {
  int rank = 0;          // the one that ended
  std::string why = {};  // "rank 2 was killed by signal 9", "rank 1 ran out of memory"
  // How many steps the copy had; 0: the loop began anew.
  int64_t step = 0;
  // From when the launcher noticed until the loop went on behind that step, by rank 0's clock.
  double seconds = 0;
};

class SurvivingRun {
 public:
  ~SurvivingRun();
  SurvivingRun(const SurvivingRun&) = delete;
  SurvivingRun& operator=(const SurvivingRun&) = delete;

  // Loads the newest copy: the model's values, the optimizer's states, generators, and what `run` has (zeropage/saving.h). Returns false where
  // there is none; nothing changes then, and run.step must be 0: a state of your own is loaded behind it. To be called once in the loop, when all is as in the first step. Collective.
  bool resume(const TrainedModule& model, ShardedOptimizer& optimizer, RunState& run);
  // To be called after each step; every SurvivalOptions::copy_every-th call copies. run.step must have grown. Throws c10::Error
  // before resume(), and state::StateError, on all ranks alike, where a copy could not be written: all go back to the one before, for as
  // many times as ranks are started again. Collective.
  void end_step(const TrainedModule& model, ShardedOptimizer& optimizer, const RunState& run);

  // How often a rank has run out of memory so far, at most SurvivalOptions::memory_rungs: the loop is called again for it, and
  // takes less memory on each rung, as by zeropage::memory_rung(). It never goes up again. The same on all ranks.
  int memory_rung() const;
  // Those so far, the oldest first. The same on all ranks, after resume().
  const std::vector<Restart>& restarts() const;

 private:
  friend class saving::SurvivingLoop;
  class Copies;
  explicit SurvivingRun(std::unique_ptr<Copies> copies);

  const std::unique_ptr<Copies> copies_;
};

// Whether a launcher starts this process's ranks again (zp run --restarts).
bool ranks_are_restarted();

// Calls the loop with the world that the launcher's variables describe, and again, with a new world, after each failure. Returns when the loop has
// returned on all ranks. Where the launcher starts no ranks again (its --restarts is 0 or used up, or it is none of ours), what the loop throws is
// thrown; copies are then made only where options.folder says so. What the loop makes must not outlive its call. Once a process, in the
// place of World::from_environment().
void survive(const std::function<void(comm::World&, SurvivingRun&)>& loop,
             const SurvivalOptions& options = {});

}  // namespace zeropage
