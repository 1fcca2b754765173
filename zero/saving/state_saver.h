// Saves a run's state again and again beside its training: a step waits for a copy of what this rank
// owns, and a thread writes it while training goes on.
//
//   zeropage::check_can_save("run", model, optimizer);  // before hours of training, not after
//   zeropage::StateSaver saver("run", model.all_ranks(), {.keep_last = 3});
//   for (...) {
//     ...
//     if (step % 1000 == 0) saver.save(model, optimizer, {.step = step});
//   }
//   saver.wait();
//
// From its construction on the folder belongs to this run. If a newer run has made a saver for the folder since (a
// job was started again while ranks of its former start live), the next save throws and removes nothing. So make
// the saver before load_state(), and one saver for a folder.
//
// A step that is older than the newest whole state from before the saver is refused: keep_last would remove it at once. So a
// new run takes a folder of its own, and one that goes back to an older state moves the newer ones away.
//
// One save at a time: the next one waits for it. An error of a save is thrown by the next save() or
// wait(), on all ranks alike; the states before are as they were, and training may go on.
//
// Memory: what this rank writes (at fp32 and Adam 12 bytes a parameter it owns), on the host, from the
// first asynchronous save to the end of the saver; Kind::kStaging on the ledger.
// Collective: all but the destructor. Threads: the training thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "comm/world.h"
#include "zero/saving/sharded_state.h"

namespace zeropage {

struct StateSaverOptions {
  // The newest keep_last states stay, and those whose step is a multiple of keep_every; older ones are removed once
  // a new one is whole. keep_last 0: all stay. keep_every 0: none beside the newest.
  int64_t keep_last = 0;
  int64_t keep_every = 0;
  // false: save() returns when the state is on the disk, and needs no memory for a copy.
  bool asynchronous = true;
  // SIGTERM and SIGINT (Ctrl-C) no longer end the process, but make stop_requested() true. A second SIGINT ends it at
  // once. A signal that the process ignored when the saver was made is ignored still.
  bool on_signal = false;
  SaveOptions save = {};
};

class StateSaver {
 public:
  // folder: of the run, made where it is not there; states are step-N in it, and `latest` names the newest. world: the
  // model's all_ranks(), or that of an optimizer alone.
  StateSaver(std::filesystem::path folder, const comm::World& world,
             const StateSaverOptions& options = {});
  // Waits for the last save. Without a wait() before, its error is only a line on stderr.
  ~StateSaver();

  // Saves the state as it is now. Returns the seconds for which training stood still.
  double save(const TrainedModule& model, ShardedOptimizer& optimizer, const RunState& run = {});
  // Waits until the last save is on the disk.
  void wait();
  // Whether a state is being written. Not collective: ranks end at different times.
  bool is_saving() const;
  // The report of the last save that ended.
  const std::optional<SavedReport>& last() const;

  // Whether any rank got SIGTERM or SIGINT: save, and end. Costs a reduction of one number.
  bool stop_requested() const { return stop_signal() != 0; }
  // Which of them: SIGTERM, SIGINT, or 0 for neither. The same on all ranks, SIGTERM where ranks got both. Costs the same.
  int stop_signal() const;

 private:
  class Saves;

  const std::unique_ptr<Saves> saves_;
};

}  // namespace zeropage
