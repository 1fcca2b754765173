// The figures of a profile as a table: by kind and rank, with the formula, and against another run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profile/report/profile.h"

namespace zeropage::profile {

// Figures of one rank, in bytes by kind, over all steps that were recorded.
struct RankRow {
  int rank = 0;
  std::vector<int64_t> held;     // at the end of the last step
  std::vector<int64_t> at_peak;  // when the total was highest
  int64_t peak = 0;
  int64_t peak_step = 0;  // in which that was
  int64_t mean_step_ns = 0;
  int64_t mean_wait_ns = 0;
};

std::vector<RankRow> rows_of(const Profile& profile);
// The one with the highest peak; ranks and steps of a profile without steps have none.
const RankProfile* rank_of_peak(const Profile& profile);
const StepProfile* step_of_peak(const RankProfile& rank, uint8_t account);
// Kinds of which any rank has bytes, in any account, by index.
std::vector<size_t> kinds_in_use(const Profile& profile);

// How one holder of the peak differs between two runs, by kind, owner and page. Blocks of both that were
// there before the steps are "before the recorded steps".
struct HolderDifference {
  std::string kind;
  std::string owner;
  std::string page;
  int64_t bytes = 0;
  int64_t other_bytes = 0;
};
// Differences between the ranks with the highest peaks, the largest first. Names and not numbers are compared, so the two
// need not have the same kinds.
std::vector<HolderDifference> difference(const Profile& profile, const Profile& other);

}  // namespace zeropage::profile
