// Steps that are enqueued before it is known whether they may be made: the device leaves one out, and the
// host has counted it until it hears of that.
#include <algorithm>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "zero/update/sharded_updates.h"

namespace zeropage {

bool ShardedUpdates::reads_found_inf() const {
  return std::all_of(updates_.begin(), updates_.end(), [](const OfPage& of_page) {
    return !of_page.part && of_page.update->reads_found_inf();
  });
}

void ShardedUpdates::step_with(const offload::GradientFactors& factors,
                               std::shared_ptr<LateReport> report) {
  hear();
  factors_ = factors;
  const auto leave = c10::make_scope_exit([this] { factors_ = {}; });
  step();
  untold_ = std::move(report);
}

// What the host counted before it knew that the device left the step out.
void ShardedUpdates::hear() {
  if (!untold_) return;
  const bool made = untold_->get().skipped == Skipped::kNo;
  untold_.reset();
  if (made) return;
  --made_;
  for (const OfPage& of_page : updates_) of_page.update->uncount_step();
}

}  // namespace zeropage
