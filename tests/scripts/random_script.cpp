#include "tests/scripts/random_script.h"

#include <random>

namespace zeropage::scripts {
namespace {

// Standard distributions differ between libraries; these draw the same everywhere.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int below(int bound) { return static_cast<int>(engine_() % static_cast<uint64_t>(bound)); }
  bool one_in(int count) { return below(count) == 0; }
  double between(double low, double high) { return low + (high - low) * below(1001) / 1000.0; }
  template <typename T>
  T any_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

std::vector<Unit> random_units(Dice& dice) {
  constexpr int kKinds = static_cast<int>(Kind::kMasked) + 1;
  std::vector<Unit> units;
  std::vector<int> linears;
  const int count = 2 + dice.below(5);
  for (int index = 0; index < count; ++index) {
    Unit unit{static_cast<Kind>(dice.below(kKinds)), 0};
    if (dice.one_in(5)) unit.kind = Kind::kMlp;
    if (unit.kind == Kind::kTied && linears.empty()) unit.kind = Kind::kLinear;
    if (unit.kind == Kind::kShared && index == 0) unit.kind = Kind::kBatchNorm;
    if (unit.kind == Kind::kTied) {
      unit.of = linears[static_cast<size_t>(dice.below(static_cast<int>(linears.size())))];
    }
    if (unit.kind == Kind::kShared) unit.of = dice.below(index);
    if (unit.kind == Kind::kLinear) linears.push_back(index);
    units.push_back(unit);
  }
  return units;
}

bool has(const std::vector<Unit>& units, Kind kind) {
  for (const Unit& unit : units) {
    if (unit.kind == kind) return true;
  }
  return false;
}

Setting random_setting(Dice& dice, const std::vector<Unit>& units) {
  Setting setting;
  setting.stage = dice.below(4);
  setting.data = 1 + dice.below(4);
  if (has(units, Kind::kMlp) && setting.data < 3 && dice.one_in(2)) setting.tensor = 2;
  if (setting.data == 4 && setting.stage > 0 && dice.one_in(2)) setting.shard_within = 2;
  setting.is_double = !dice.one_in(4);
  setting.is_offloaded = !setting.is_double && dice.one_in(2);
  setting.kept = dice.any_of({Kept::kAll, Kept::kAll, Kept::kRegions, Kept::kRecompute});
  setting.page_bytes = dice.any_of<int64_t>({4096, 8192, 1 << 20});
  return setting;
}

void add_backwards(Dice& dice, std::vector<Action>& actions) {
  const int micro_steps = 1 + (dice.one_in(3) ? 1 + dice.below(2) : 0);
  const bool syncs_all = dice.one_in(2);
  for (int micro_step = 0; micro_step < micro_steps; ++micro_step) {
    const bool syncs = syncs_all || micro_step + 1 == micro_steps;
    const int half = dice.one_in(6) ? 1 : 0;
    actions.push_back({syncs ? Does::kBackward : Does::kBackwardNoSync, half,
                       dice.one_in(3) ? dice.between(0.3, 2) : 1});
  }
}

// Between the last backward and the step.
void add_changes_of_gradients(Dice& dice, std::vector<Action>& actions, bool has_slices) {
  const int which = dice.below(64);
  if (dice.one_in(8)) actions.push_back({Does::kScaleGrad, which, dice.between(0.3, 1.5)});
  if (dice.one_in(12)) actions.push_back({Does::kZeroOneGrad, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kDropGrad, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kSetGrad, which, dice.between(-0.5, 0.5)});
  if (dice.one_in(8)) actions.push_back({Does::kReadNorm, 0, 1});
  if (dice.one_in(4)) {
    // LibTorch's takes the norm of slices for that of the whole.
    const int by_torch = has_slices ? 0 : dice.below(2);
    actions.push_back({Does::kClip, by_torch, dice.between(0.05, 1.5)});
  }
}

// Between steps.
void add_changes_of_the_run(Dice& dice, std::vector<Action>& actions, bool may_resume,
                            int settings) {
  const int which = dice.below(64);
  if (dice.one_in(8)) actions.push_back({Does::kLearningRate, which, dice.between(0.3, 1.2)});
  if (dice.one_in(12)) actions.push_back({Does::kFreeze, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kUnfreeze, which, 1});
  if (dice.one_in(6)) actions.push_back({Does::kEvaluate, 0, 1});
  if (dice.one_in(12)) actions.push_back({Does::kThrow, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kWriteGuarded, which, dice.between(0.5, 1.5)});
  if (dice.one_in(12)) actions.push_back({Does::kWriteAlike, which, dice.between(0.5, 1.5)});
  if (dice.one_in(4)) actions.push_back({Does::kAverage, 0, 1});
  if (dice.one_in(10)) actions.push_back({Does::kSeeAverage, 0, 1});
  if (may_resume && dice.one_in(6)) actions.push_back({Does::kResume, dice.below(settings), 1});
}

// Somewhere, and two steps after it, in which it must be noticed.
void add_a_wrong_one(Dice& dice, std::vector<Action>& actions) {
  const auto does = dice.any_of({Does::kOwnLearningRate, Does::kOwnWrite, Does::kOwnLeftStep});
  const auto place = dice.below(static_cast<int>(actions.size()) + 1);
  actions.insert(actions.begin() + place, {does, dice.below(64), dice.between(0.3, 0.8)});
  for (int step = 0; step < 2; ++step) {
    actions.push_back({Does::kZeroGrad, 0, 1});
    actions.push_back({Does::kBackward, 0, 1});
    actions.push_back({Does::kStep, 0, 1});
  }
}

}  // namespace

Script random_script(uint64_t seed) {
  Dice dice(seed);
  Script script;
  script.seed = seed;
  script.units = random_units(dice);
  script.rule = dice.any_of({Rule::kSgd, Rule::kAdam, Rule::kAdamW, Rule::kAdagrad});
  script.groups = 1 + (dice.one_in(3) ? 1 : 0);
  script.optimizers = 1 + (dice.one_in(6) ? 1 : 0);
  script.settings.push_back(random_setting(dice, script.units));
  if (dice.one_in(2)) {
    // A state in double does not go on in fp32, and the other way round the sides would differ.
    Setting other = random_setting(dice, script.units);
    other.is_double = script.settings.front().is_double;
    other.is_offloaded = other.is_offloaded && !other.is_double;
    script.settings.push_back(other);
  }
  bool has_slices = false;
  for (const Setting& setting : script.settings) has_slices = has_slices || setting.tensor > 1;
  const int steps = 1 + dice.below(4);
  for (int step = 0; step < steps; ++step) {
    if (step > 0 && !dice.one_in(10)) {
      script.actions.push_back({Does::kZeroGrad, dice.below(4), 1});
    }
    add_backwards(dice, script.actions);
    add_changes_of_gradients(dice, script.actions, has_slices);
    const bool steps_now = !dice.one_in(12);
    if (steps_now) script.actions.push_back({Does::kStep, 0, 1});
    add_changes_of_the_run(dice, script.actions, steps_now && script.optimizers == 1,
                           static_cast<int>(script.settings.size()));
  }
  if (dice.one_in(10)) add_a_wrong_one(dice, script.actions);
  return script;
}

}  // namespace zeropage::scripts
