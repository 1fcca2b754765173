// The bytes of an account over a step, as its changes add up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profile/report/profile.h"

namespace zeropage::profile {

struct Moment {
  int64_t time_ns = 0;
  std::vector<int64_t> by_kind;
  int64_t total = 0;
  Change::Phase phase = Change::Phase::kOther;
};

// At the step's begin.
Moment begin_of(const StepProfile& step, uint8_t account);
// Calls visit(moment) at the begin and after each change of the account.
template <typename Visit>
void walk(const StepProfile& step, uint8_t account, Visit visit) {
  Moment moment = begin_of(step, account);
  visit(moment);
  for (const Change& change : step.changes) {
    if (change.account != account) continue;
    moment.time_ns = change.time_ns;
    moment.phase = change.phase;
    moment.by_kind[change.kind] += change.bytes;
    if (change.is_rename()) {
      moment.by_kind[change.kind_before] -= change.bytes;
    } else {
      moment.total += change.bytes;
    }
    visit(moment);
  }
}

// The first moment at which the total is highest.
Moment peak_of(const StepProfile& step, uint8_t account);

// At most `most` moments, in order: of each stretch of time the one whose total is highest, so that the
// peak is among them.
std::vector<Moment> sampled(const StepProfile& step, uint8_t account, size_t most);

// The owners of the bytes at the peak that were allocated within the step, the largest first.
struct Holder {
  uint8_t kind = 0;
  std::string owner;
  std::string page;
  int64_t bytes = 0;
  int64_t blocks = 0;
};
std::vector<Holder> holders_at_peak(const RankProfile& rank, const StepProfile& step,
                                    uint8_t account);

}  // namespace zeropage::profile
