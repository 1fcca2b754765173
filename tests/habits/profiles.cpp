// How scripts profile their steps.
#include "tests/habits/scripts.h"
#include "zeropage/profiler.h"

namespace zeropage::habits_of_profiles {
namespace {

using namespace zeropage::testing;
using profile::Profiler;

constexpr const char* kGroup = "Profiling";

// LibTorch's run has nothing to record.
template <typename Run, typename Train>
void recorded(Run& run, const Train& train) {
  constexpr int kSteps = 3;
  if constexpr (Run::kOurs) {
    Profiler profiler(run.world(), {.first_step = 1, .last_step = 1});
    for (int step = 0; step < kSteps; ++step) {
      const auto scope = profiler.step(step);
      train(step);
    }
    const profile::Profile joined = profiler.join();
    EXPECT_EQ(joined.ranks.size(), run.rank() == 0 ? static_cast<size_t>(run.ranks()) : 0U);
  } else {
    for (int step = 0; step < kSteps; ++step) train(step);
  }
}

const int kOneStep =
    is_right(kGroup, "records one step of its loop",
             [](auto& run) {
               auto model = run.wrap(make<Mlp>());
               auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1));
               recorded(run, [&](int step) { train_step(run, model, *optimizer, step); });
               return everything(run, model);
             },
             {.over = Over::kFp32});

const int kKept =
    is_refused(kGroup, "keeps what Profiler::step() returned when the next step begins",
               "the step before it is still being recorded", "let it end with the step's block",
               [](auto& run) {
                 Profiler profiler(run.world(), {.first_step = 0, .last_step = 1});
                 const auto first = profiler.step(0);
                 const auto second = profiler.step(1);
               },
               {.stages = {1}});

const int kTwo = is_refused(kGroup, "records a step by two profilers at once",
                            "another Profiler is recording them",
                            "record with one, and write its profile more than once",
                            [](auto& run) {
                              Profiler outer(run.world(), {.first_step = 0, .last_step = 0});
                              Profiler inner(run.world(), {.first_step = 0, .last_step = 0});
                              const auto of_outer = outer.step(0);
                              const auto of_inner = inner.step(0);
                            },
                            {.stages = {1}});

}  // namespace
}  // namespace zeropage::habits_of_profiles
