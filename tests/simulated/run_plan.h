// What a simulated run is, and what happens to it: made of a seed.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace zeropage::simulated {

enum class FaultKind : uint8_t {
  kDeath,      // the rank's process is killed
  kThrow,      // an exception leaves the loop of the rank, which keeps its process
  kStop,       // nothing of the process moves any more, as by SIGSTOP
  kStuck,      // the loop stands still, and the process shows life
  kPartition,  // nothing comes from the rank or reaches it, for a time
  kSlow,       // all that the rank sends is late from here on
  kDiskFull,   // writing a copy fails with ENOSPC, for a time or for good
  kTornFile,   // a file of a copy lacks its second half, and the rank is killed
};
inline constexpr int kFaultKinds = 8;
const char* name(FaultKind kind);

// Where a rank is when it happens.
enum class Where : uint8_t {
  kStep,        // before a step
  kCollective,  // at a call of the communicator
  kCopy,        // at a file of a copy that is written
  kMeeting,     // at a call of the store, while ranks meet
  kLoad,        // at a call of the store or the communicator, in resume()
};
const char* name(Where where);

struct Fault {
  FaultKind kind = FaultKind::kDeath;
  Where where = Where::kStep;
  int rank = 0;
  int generation = 0;
  // The step, or the number of the call in that generation, from 0.
  int64_t at = 0;
  // How long a partition lasts, or how late all of a slow rank's messages are.
  std::chrono::milliseconds time{};
  // How many writes a full disk refuses; 0: all from there on.
  int writes = 0;

  // "death of rank 2 in generation 0 at step 7"
  std::string words() const;
};

// What the bits of a run follow from.
struct Training {
  int ranks = 2;
  int stage = 0;
  int micro_steps = 1;
  bool drops_out = false;
  uint64_t model_seed = 0;

  friend auto operator<=>(const Training&, const Training&) = default;
};

struct RunPlan {
  uint64_t seed = 0;
  Training training;
  int64_t steps = 8;
  int64_t copy_every = 3;
  int restarts = 1;
  // Gloo over TCP instead of shared memory.
  bool over_sockets = false;
  // Not by rank 0.
  bool launcher_serves_store = false;
  std::vector<Fault> faults = {};
  // A rank reads what the former generation has written (--plant stale-generation).
  bool reads_former_generation = false;

  std::string words() const;
};

RunPlan plan_of(uint64_t seed);
// A rank of it reads keys of the former generation; behind a death, without which there is one generation alone.
void plant_stale_generation(RunPlan& plan);

// Both are short, since nothing but the machine's load makes a simulated rank late.
inline constexpr std::chrono::milliseconds kDeadline{250};
inline constexpr std::chrono::milliseconds kGrace{400};
inline constexpr int64_t kLeastSteps = 8;
inline constexpr int64_t kMostSteps = 30;

}  // namespace zeropage::simulated
