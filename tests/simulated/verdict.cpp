#include "tests/simulated/verdict.h"

#include <algorithm>
#include <regex>
#include <sstream>

namespace zeropage::simulated {
namespace {

bool happened(const RunPlan& plan, const Outcome& outcome, FaultKind kind) {
  for (size_t number = 0; number < plan.faults.size(); ++number) {
    if (outcome.happened[number] && plan.faults[number].kind == kind) return true;
  }
  return false;
}

bool is_full_for_good(const RunPlan& plan, const Outcome& outcome) {
  for (size_t number = 0; number < plan.faults.size(); ++number) {
    const Fault& fault = plan.faults[number];
    if (outcome.happened[number] && fault.kind == FaultKind::kDiskFull && fault.writes == 0) {
      return true;
    }
  }
  return false;
}

// Whether the faults explain that no restart was left.
bool can_use_up_restarts(const RunPlan& plan, const Outcome& outcome) {
  const auto faults = std::count(outcome.happened.begin(), outcome.happened.end(), true);
  // A slow rank may be late at each start, and a full disk refuses each copy.
  if (is_full_for_good(plan, outcome) || happened(plan, outcome, FaultKind::kSlow)) return true;
  // A full disk may be noticed in several starts, and who is cut off may fail beside the others.
  return faults > 0 && plan.restarts <= 3 * faults;
}

// What an error of a survivor must have: the rank, or the file, and why.
bool is_named(const std::string& error) {
  static const std::regex named("rank [0-9]+|No space left on device|/states/");
  return std::regex_search(error, named);
}

Verdict failure(const std::string& words) {
  return {Verdict::Is::kFailure, words};
}

}  // namespace

Verdict verdict_on(const RunPlan& plan, const Outcome& outcome) {
  if (!outcome.hung.empty()) {
    std::ostringstream words;
    words << "after " << outcome.seconds << " s these ranks have not ended:";
    for (const int rank : outcome.hung) words << " " << rank;
    return failure(words.str());
  }
  bool all_ended_well = true;
  std::string error;
  const Ending unbroken = unbroken_ending(plan.training, plan.steps);
  for (size_t rank = 0; rank < outcome.ranks.size(); ++rank) {
    const Outcome::OfRank& of = outcome.ranks[rank];
    if (!of.ending) all_ended_well = false;
    if (of.ending && *of.ending != unbroken) {
      std::ostringstream words;
      words << std::hex << "rank " << rank << " ended with other bits: expected " << unbroken.hash
            << std::dec << " at step " << unbroken.step << " (" << unbroken.noted << " noted), got "
            << std::hex << of.ending->hash << std::dec << " at step " << of.ending->step << " ("
            << of.ending->noted << " noted)";
      return failure(words.str());
    }
    if (!of.error.empty() && !is_named(of.error)) {
      return failure("rank " + std::to_string(rank) +
                     " ended with an error that names neither rank nor file: " + of.error);
    }
    if (error.empty()) error = of.error;
    if (of.was_killed && error.empty()) error = "a rank was killed";
  }
  if (all_ended_well) return {};
  if (outcome.generations < plan.restarts) {
    // Who has finished is not there to meet the others, so a rank that dies then ends the run.
    const bool some_ended = std::any_of(outcome.ranks.begin(), outcome.ranks.end(),
                                        [](const auto& rank) { return rank.ending.has_value(); });
    const bool late_fault = std::count(outcome.happened.begin(), outcome.happened.end(), true) > 0;
    if (some_ended && late_fault) return {Verdict::Is::kNamedError, error};
    return failure("the run ended, though restarts were left: " + error);
  }
  if (!can_use_up_restarts(plan, outcome)) {
    return failure("its faults do not explain " + std::to_string(outcome.generations) +
                   " restarts: " + error);
  }
  return {Verdict::Is::kNamedError, error};
}

}  // namespace zeropage::simulated
