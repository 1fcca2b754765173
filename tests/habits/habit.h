// Habits of training scripts, each run over stages, modes and ranks: it is right, which means LibTorch's
// values, or refused. The table in docs/habits.md is made of them.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/habits/run.h"

namespace zeropage::testing {

struct Habit {
  std::string group;    // "Optimizers"
  std::string does;     // what the script does, for the table
  std::string instead;  // of one that is refused: what the table says to do
  std::function<void()> check;
};

// All that were added.
const std::deque<Habit>& habits();
// Also as a test, named by what it does.
int add_habit(Habit habit);

// Which settings a habit is run in.
enum class Over {
  kAll,          // stages 0-3 in fp32 on 2 ranks; 0 and 3 on 1 and 3; 1 and 3 in the other modes
  kFp32,         // those in fp32
  kNotAutocast,  // those without autocast
};

struct RightOptions {
  Over over = Over::kAll;
  // Between LibTorch's values and ours, where both are not the same bits by design: sums over three
  // ranks, and the host's fused update.
  double tolerance = 0;
  // The last stage at which a script can do it.
  int up_to_stage = 3;
};

std::vector<Setting> settings_over(Over over);
// What LibTorch's run is like: stages, offload and recompute are nothing to it.
Mode plain_mode(Mode mode);
// Fails the current test unless they are as alike as the setting promises.
void expect_alike(const std::vector<Values>& expected, const std::vector<Values>& actual,
                  const Setting& setting, double tolerance);

// script: Values(auto& run), what each rank ends with.
template <typename Script>
std::vector<Values> values_of_ranks(const Setting& setting, const Script& script, auto make_run) {
  std::vector<Values> by_rank(static_cast<size_t>(setting.ranks));
  run_ranks(setting.ranks, [&](World& world) {
    auto run = make_run(world);
    by_rank[static_cast<size_t>(world.rank())] = script(run);
  });
  return by_rank;
}

template <typename Script>
int is_right(std::string group, std::string does, const Script& script,
             const RightOptions& options = {}) {
  return add_habit({std::move(group), std::move(does), "", [script, options] {
                      std::map<std::pair<Mode, int>, std::vector<Values>> right;
                      for (const Setting& setting : settings_over(options.over)) {
                        if (setting.stage > options.up_to_stage) continue;
                        SCOPED_TRACE(::testing::Message() << setting);
                        auto& expected = right[{plain_mode(setting.mode), setting.ranks}];
                        if (expected.empty()) {
                          expected = values_of_ranks(setting, script, [&](World& world) {
                            return PlainRun(world, setting);
                          });
                        }
                        const auto actual = values_of_ranks(
                            setting, script, [&](World& world) { return OurRun(world, setting); });
                        expect_alike(expected, actual, setting, options.tolerance);
                      }
                    }});
}

struct RefusedOptions {
  std::vector<int> stages = {0, 1, 2, 3};
  int ranks = 2;
  Mode mode = Mode::kFp32;
};

// words: part of what rank 0 is told.
template <typename Script>
int is_refused(std::string group, std::string does, std::string words, std::string instead,
               const Script& script, const RefusedOptions& options = {}) {
  return add_habit(
      {std::move(group), std::move(does), std::move(instead), [script, words, options] {
         for (const int stage : options.stages) {
           const Setting setting{.stage = stage, .mode = options.mode, .ranks = options.ranks};
           SCOPED_TRACE(::testing::Message() << setting);
           const auto errors = try_ranks(setting.ranks, [&](World& world) {
             OurRun run(world, setting);
             script(run);
           });
           EXPECT_NE(message_of(errors[0]).find(words), std::string::npos)
               << "it said: \"" << message_of(errors[0]) << "\"";
         }
       }});
}

}  // namespace zeropage::testing
