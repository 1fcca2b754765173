#include "tests/simulated/run_plan.h"

#include <array>
#include <sstream>

#include "tests/scripts/dice.h"

namespace zeropage::simulated {
namespace {

using std::chrono::milliseconds;

// More than any number of faults can use up.
constexpr int kPlentyOfRestarts = 12;

Where place_of(FaultKind kind, scripts::Dice& dice) {
  switch (kind) {
    case FaultKind::kDiskFull:
      return Where::kCopy;
    case FaultKind::kThrow:
    case FaultKind::kStuck:
      return Where::kStep;
    case FaultKind::kTornFile:
      return dice.any_of({Where::kStep, Where::kCopy});
    default:
      return dice.any_of(
          {Where::kStep, Where::kCollective, Where::kCopy, Where::kMeeting, Where::kLoad});
  }
}

int64_t number_at(Where where, const RunPlan& plan, scripts::Dice& dice) {
  switch (where) {
    case Where::kStep:
      return dice.below(static_cast<int>(plan.steps));
    case Where::kCollective:
      return dice.below(static_cast<int>(plan.steps) * 4);
    case Where::kCopy:
      return dice.below(60);
    case Where::kMeeting:
      return dice.below(40);
    case Where::kLoad:
      return dice.below(60);
  }
  return 0;
}

Fault random_fault(const RunPlan& plan, scripts::Dice& dice) {
  Fault fault;
  fault.kind =
      dice.any_of({FaultKind::kDeath, FaultKind::kDeath, FaultKind::kDeath, FaultKind::kThrow,
                   FaultKind::kStop, FaultKind::kStuck, FaultKind::kPartition, FaultKind::kSlow,
                   FaultKind::kDiskFull, FaultKind::kTornFile, FaultKind::kTornFile});
  fault.where = place_of(fault.kind, dice);
  fault.rank = dice.below(plan.training.ranks);
  fault.at = number_at(fault.where, plan, dice);
  if (fault.kind == FaultKind::kPartition) {
    fault.time = milliseconds(10 + dice.below(3 * static_cast<int>(kDeadline.count())));
  }
  if (fault.kind == FaultKind::kSlow) fault.time = milliseconds(1 + dice.below(4));
  if (fault.kind == FaultKind::kDiskFull) fault.writes = dice.one_in(5) ? 0 : 1 + dice.below(6);
  return fault;
}

}  // namespace

const char* name(FaultKind kind) {
  constexpr std::array<const char*, kFaultKinds> kNames = {"death",      "exception", "stop",
                                                           "stuck loop", "partition", "slow link",
                                                           "full disk",  "torn file"};
  return kNames[static_cast<size_t>(kind)];
}

const char* name(Where where) {
  constexpr std::array<const char*, 5> kNames = {"step", "collective", "call about a copy's file",
                                                 "call of a meeting", "call of a load"};
  return kNames[static_cast<size_t>(where)];
}

std::string Fault::words() const {
  std::ostringstream words;
  words << name(kind) << " of rank " << rank << " in generation " << generation << " at "
        << name(where) << " " << at;
  if (kind == FaultKind::kPartition) words << " for " << time.count() << " ms";
  if (kind == FaultKind::kSlow) words << " by " << time.count() << " ms";
  if (kind == FaultKind::kDiskFull) {
    words << (writes == 0 ? std::string(" for good")
                          : " for " + std::to_string(writes) + " writes");
  }
  return words.str();
}

std::string RunPlan::words() const {
  std::ostringstream words;
  words << training.ranks << " ranks, stage " << training.stage << ", " << training.micro_steps
        << " micro-steps" << (training.drops_out ? ", dropout" : "") << ", " << steps
        << " steps, a copy every " << copy_every << ", " << restarts << " restarts, "
        << (over_sockets ? "sockets" : "shared memory") << ", the store is "
        << (launcher_serves_store ? "the launcher's" : "rank 0's");
  for (const Fault& fault : faults) words << "; " << fault.words();
  return words.str();
}

RunPlan plan_of(uint64_t seed) {
  scripts::Dice dice(seed * 0x9e3779b97f4a7c15U + 1);
  RunPlan plan;
  plan.seed = seed;
  plan.training = {.ranks = 2 + dice.below(3),
                   .stage = dice.below(4),
                   .micro_steps = 1 + dice.below(2),
                   .drops_out = dice.one_in(2),
                   .model_seed = static_cast<uint64_t>(dice.below(2))};
  const int64_t longest = dice.one_in(4) ? kMostSteps : kMostSteps / 2;
  plan.steps = kLeastSteps + dice.below(static_cast<int>(longest - kLeastSteps) + 1);
  // A copy takes longer than the steps between two.
  plan.copy_every = dice.one_in(4) ? 1 : 2 + dice.below(6);
  plan.over_sockets = dice.one_in(3);
  plan.launcher_serves_store = dice.one_in(3);
  const int faults = dice.one_in(12) ? 0 : 1 + dice.below(2);
  for (int number = 0; number < faults; ++number) {
    Fault fault = random_fault(plan, dice);
    // Nothing is there to load in the first start, and a second fault may hit ranks that go back.
    const bool goes_back = fault.where == Where::kLoad || (number > 0 && dice.one_in(2));
    fault.generation = goes_back ? number : 0;
    plan.faults.push_back(fault);
  }
  plan.restarts = dice.one_in(6) ? 1 : kPlentyOfRestarts;
  return plan;
}

void plant_stale_generation(RunPlan& plan) {
  plan.reads_former_generation = true;
  plan.copy_every = 2;
  plan.restarts = kPlentyOfRestarts / 3;
  plan.faults = {{.kind = FaultKind::kDeath, .where = Where::kStep, .at = plan.steps - 1}};
}

}  // namespace zeropage::simulated
