#include <c10/util/ScopeExit.h>

#include "profile/detail/names_of_accounts.h"
#include "profile/operator_names.h"
#include "profile/recorder.h"
#include "profile/report/growth.h"
#include "zeropage/check.h"
#include "zeropage/profiler.h"

namespace zeropage::profile {

std::string growth_over(int64_t steps, const std::function<void()>& step) {
  ZP_CHECK(steps >= 3, "EXPECT_NO_GROWTH(", steps,
           "): expected 3 steps or more, as two tell no growth from a step that holds more once");
  step();
  const auto recorder = Recorder::make(memory::Ledger::current());
  recorder->attach();
  const auto detach = c10::make_scope_exit([&] { recorder->detach(); });
  const OperatorNames names;
  for (int64_t number = 0; number < steps; ++number) {
    recorder->begin_step(number);
    const auto end = c10::make_scope_exit([&] { recorder->end_step(); });
    step();
  }
  Profile profile = detail::named_profile();
  profile.ranks.push_back(recorder->profile(/*rank=*/0));
  std::string text;
  for (const Growth& growth : growth_of(profile)) text += growth.to_string() + "\n";
  return text;
}

}  // namespace zeropage::profile
