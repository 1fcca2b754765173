// Brings the faults of a run about: what its ranks do passes here and is counted, and a fault happens to the rank at its number.
//
// Lifetime: outlives all that the ranks leave behind, so it is shared. Threads: any.
#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/harness/faulty_calls.h"
#include "tests/simulated/rank_life.h"
#include "tests/simulated/run_plan.h"
#include "zeropage/ledger.h"

namespace zeropage::simulated {

class Scenario {
 public:
  enum class Phase : uint8_t { kMeets, kLoads, kTrains };

  explicit Scenario(const RunPlan& plan);

  // A process begins; what has `ledger` is done by it.
  void start(int rank, const std::shared_ptr<RankLife>& life,
             const std::shared_ptr<memory::Ledger>& ledger);
  void begin_generation(int rank, int generation);
  void begin_phase(int rank, Phase phase);
  Phase phase_of(int rank) const;

  // These throw Killed where the process is dead, and wait where it is held up. folder: of the copies.
  void at_step(int rank, int64_t step, const std::filesystem::path& folder);
  void at_collective(int rank);
  // false: the process is dead.
  bool at_store_call(int rank, const std::shared_ptr<RankLife>& life);
  testing::FaultOfCall at_file(const std::string& call, const std::string& path);

  // Those that happened, by their place in the plan.
  std::vector<bool> happened() const;
  // Steps that were made and are not in the run that has ended, all ranks' the same.
  int64_t lost_steps() const;
  void note_resume(int rank, int64_t step);
  void note_step(int rank, int64_t step);

 private:
  struct Rank {
    std::shared_ptr<RankLife> life;
    std::shared_ptr<memory::Ledger> ledger;
    int generation = 0;
    Phase phase = Phase::kMeets;
    // Calls in the generation.
    int64_t collectives = 0, meeting_calls = 0, load_calls = 0;
    int64_t step = 0;
    // At that step the process is killed, for a file was torn; -1: at none.
    int64_t dies_at = -1;
  };

  const Fault* due(int rank, Where where, int64_t at);
  std::shared_ptr<RankLife> life_of(int rank) const;
  // On a thread of that process; throws Killed.
  void befall(const Fault& fault, RankLife& life);

  const RunPlan plan_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Rank> ranks_;
  std::vector<bool> happened_;
  int64_t lost_steps_ = 0;
  int newest_ = 0;              // generation
  int64_t file_calls_ = 0;      // in it
  int64_t refused_writes_ = 0;  // still to come
};

}  // namespace zeropage::simulated
