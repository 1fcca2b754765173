#include "tests/scripts/random_script.h"

#include <algorithm>

#include "tests/scripts/dice.h"

namespace zeropage::scripts {
namespace {

// What LibTorch computes in bf16, and in fp16, on the host.
bool is_in(Values values, Kind kind) {
  if (values != Values::kHalf) return true;
  return kind == Kind::kLinear || kind == Kind::kMlp || kind == Kind::kTiled ||
         kind == Kind::kEmbedding || kind == Kind::kLayerNorm || kind == Kind::kShared ||
         kind == Kind::kTied || kind == Kind::kFrozen || kind == Kind::kFunction ||
         kind == Kind::kView || kind == Kind::kScalar || kind == Kind::kUnused ||
         kind == Kind::kNoGrad || kind == Kind::kBranch || kind == Kind::kStrided;
}

// pipelines: whether some settings have one, in which nobody says in which order masks are drawn. by_rows: whether some have a
// context axis.
std::vector<Unit> random_units(Dice& dice, Values values, bool pipelines, bool by_rows) {
  constexpr int kKinds = static_cast<int>(Kind::kTiled) + 1;
  std::vector<Unit> units;
  std::vector<int> linears;
  const bool is_sparse = dice.one_in(4);
  const int count = pipelines ? 4 + dice.below(4) : 2 + dice.below(5);
  for (int index = 0; index < count; ++index) {
    Unit unit{static_cast<Kind>(dice.below(kKinds)), 0};
    if (dice.one_in(5)) unit.kind = dice.any_of({Kind::kMlp, Kind::kMlp, Kind::kTiled});
    if (is_sparse && dice.one_in(2)) {
      unit.kind =
          dice.any_of({Kind::kExperts, Kind::kSigmoidExperts, Kind::kTightExperts, Kind::kTouched});
    }
    if (by_rows && !is_by_row(unit.kind)) unit.kind = Kind::kCausal;
    if (by_rows && index == 0) unit.kind = Kind::kCausal;
    if (!is_in(values, unit.kind)) unit.kind = Kind::kLayerNorm;
    // A stage that is not the last has no loss to add to.
    if (pipelines && unit.kind == Kind::kExperts) unit.kind = Kind::kSigmoidExperts;
    if (pipelines && (unit.kind == Kind::kMasked || unit.kind == Kind::kDrawn)) {
      unit.kind = Kind::kTied;
    }
    if (unit.kind == Kind::kTied && linears.empty()) unit.kind = Kind::kLinear;
    if (unit.kind == Kind::kShared && index == 0) unit.kind = Kind::kLayerNorm;
    if (unit.kind == Kind::kTied) {
      unit.of = linears[static_cast<size_t>(dice.below(static_cast<int>(linears.size())))];
    }
    if (unit.kind == Kind::kShared) unit.of = dice.below(index);
    // It knows one draw of a pass.
    if (unit.kind == Kind::kShared && units[static_cast<size_t>(unit.of)].kind == Kind::kDrawn) {
      unit = {Kind::kLayerNorm, 0};
    }
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

void leave_the_device(Dice& dice, Setting& setting) {
  if (!dice.one_in(2)) return;
  setting.optimizer = dice.any_of({Tier::kHost, Tier::kHost, Tier::kNvme});
  if (setting.stage == 3 && dice.one_in(2)) {
    setting.parameters = dice.any_of({Tier::kHost, Tier::kNvme});
  }
}

// Makes the setting a pipeline, if the units can be cut so.
void cut_into_stages(Dice& dice, const Script& script, Setting& setting) {
  Setting cut = setting;
  cut.pipeline = 2 + dice.below(2);
  cut.data = cut.pipeline == 2 ? 1 + dice.below(2) : 1;
  cut.tensor = cut.data == 1 && cut.pipeline == 2 ? cut.tensor : 1;
  cut.shard_within = cut.secondary_shard_within = 0;
  cut.order = dice.any_of({ScheduleKind::kOneForwardOneBackward, ScheduleKind::kGPipe,
                           ScheduleKind::kInterleaved, ScheduleKind::kZeroBubble});
  if (cut.order == ScheduleKind::kZeroBubble && has(script.units, Kind::kTiled)) {
    cut.order = ScheduleKind::kOneForwardOneBackward;
  }
  if (cut.order == ScheduleKind::kInterleaved) cut.chunks = 2;
  if (cut.order == ScheduleKind::kZeroBubble &&
      (cut.kept == Kept::kRegions || cut.kept == Kept::kRecompute)) {
    cut.kept = Kept::kOnHost;
  }
  cut.is_deferred = script.values != Values::kDouble && dice.one_in(2);
  if (!can_be_cut(script, cut)) return;
  // The others are refused.
  if (!has_slices(script)) cut.tensor = 1;
  setting = cut;
}

// Where memory and time are spent.
void choose_costs(Dice& dice, const Script& script, Setting& setting) {
  if (setting.stage == 3) {
    setting.stays = dice.any_of(
        {Reshard::kAfterUse, Reshard::kAfterUse, Reshard::kAfterBackward, Reshard::kAfterStep});
    setting.prefetch_bytes = dice.any_of<int64_t>({-1, -1, 0, 4096});
    setting.minimum_sharded_bytes = dice.any_of<int64_t>({0, 0, 600, 4096});
    const bool may_be_second = setting.data == 4 && setting.shard_within == 0 &&
                               setting.stays == Reshard::kAfterUse &&
                               setting.parameters == Tier::kDevice;
    if (may_be_second && dice.one_in(2)) setting.secondary_shard_within = 2;
  }
  if (setting.optimizer != Tier::kDevice && setting.parameters == Tier::kDevice && dice.one_in(3)) {
    setting.offloaded_bytes = dice.any_of<int64_t>({2048, 20000});
  }
  if (script.beside == Beside::kTwin) return;
  // A micro-step's own reduction, or one of all, add up in another order.
  if (script.accumulation.is_on && setting.stage >= 2 && dice.one_in(3)) {
    setting.gradient_budget_bytes = dice.any_of<int64_t>({4096, 1 << 20});
  }
  // Its bits are others.
  setting.is_by_class = script.values == Values::kFloat && setting.optimizer == Tier::kDevice &&
                        !reads_whole_tensors(script.rule) && dice.one_in(4);
}

Setting random_setting(Dice& dice, const Script& script, bool pipelines) {
  Setting setting;
  setting.stage = dice.below(4);
  setting.data = 1 + dice.below(4);
  const bool may_be_cut = has(script.units, Kind::kMlp) || has(script.units, Kind::kTiled);
  if (may_be_cut && setting.data < 3 && dice.one_in(2)) setting.tensor = 2;
  if (setting.data == 4 && setting.stage > 0 && dice.one_in(2)) setting.shard_within = 2;
  // A double has no fused update, which alone leaves the device. Groups of ranks add up in their order.
  if (script.values != Values::kDouble) leave_the_device(dice, setting);
  if (script.beside == Beside::kTwin) setting.shard_within = 0;
  setting.kept = dice.any_of({Kept::kAll, Kept::kAll, Kept::kAll, Kept::kRegions, Kept::kRecompute,
                              Kept::kRecompute, Kept::kOnHost});
  if (setting.kept == Kept::kOnHost && dice.one_in(3)) setting.kept = Kept::kOnNvme;
  setting.page_bytes = dice.any_of<int64_t>({4096, 8192, 1 << 20});
  if (script.accumulation.is_on) {
    setting.reduced =
        dice.any_of({ReduceMicroSteps::kAuto, ReduceMicroSteps::kEach, ReduceMicroSteps::kOnce});
  }
  setting.saves_aside = dice.one_in(3);
  // Without a throw of the dice, so that seeds keep their scripts.
  setting.parks = script.seed % 3 == 0;
  choose_costs(dice, script, setting);
  if (pipelines) cut_into_stages(dice, script, setting);
  return setting;
}

// Two ranks have the rows of a sample, if all that the script says is right there.
void share_rows(Dice& dice, Script& script) {
  if (!can_share_rows(script)) script.has_context = false;
  if (!script.has_context) return;
  for (Setting& setting : script.settings) {
    if (setting.is_alone || dice.one_in(4)) continue;
    setting.context = 2;
    setting.is_by_heads = dice.one_in(2);
    const bool had_groups = setting.shard_within + setting.secondary_shard_within > 0;
    setting.data = setting.tensor == 1 && (had_groups || dice.one_in(2)) ? 2 : 1;
    if (setting.data == 1) setting.shard_within = setting.secondary_shard_within = 0;
  }
}

// Ranks have some of the experts each, if all that the script says is right there.
void spread_experts(Dice& dice, Script& script) {
  if (!has_experts(script) || script.has_pipelines || script.is_world_invariant) return;
  if (reads_whole_tensors(script.rule)) return;
  for (Setting& setting : script.settings) {
    if (setting.tensor > 1 || dice.one_in(4)) continue;
    setting.shard_within = setting.secondary_shard_within = 0;
    setting.expert = setting.context == 1 ? dice.any_of({2, 2, 4}) : 2;
    setting.data = setting.context * setting.expert == 2 ? 1 + dice.below(2) : 1;
  }
}

void add_backwards(Dice& dice, std::vector<Action>& actions) {
  const int micro_steps = 1 + (dice.one_in(3) ? 1 + dice.below(2) : 0);
  const bool syncs_all = dice.one_in(2);
  for (int micro_step = 0; micro_step < micro_steps; ++micro_step) {
    const bool syncs = syncs_all || micro_step + 1 == micro_steps;
    const int half = dice.one_in(6) ? 1 : 0;
    const Does with_sync = dice.one_in(8) ? Does::kBackwardTwice : Does::kBackward;
    actions.push_back({syncs ? with_sync : Does::kBackwardNoSync, half,
                       dice.one_in(3) ? dice.between(0.3, 2) : 1});
  }
}

// So many as all schedules take: three ranks of a pipeline need three, and groups are of two or three.
void add_micro_batches(Dice& dice, std::vector<Action>& actions, bool pipelines) {
  if (dice.one_in(12)) actions.push_back({Does::kInfinite, 0, 1});
  const int count = pipelines ? dice.any_of({6, 6, 6, 12}) : 1 + dice.below(3);
  if (pipelines || dice.one_in(3)) return actions.push_back({Does::kMicroBatches, count, 1});
  for (int micro_batch = 0; micro_batch < count; ++micro_batch) {
    if (dice.one_in(12)) actions.push_back({Does::kEvaluate, 0, 1});
    if (micro_batch > 0 && dice.one_in(12)) {
      actions.push_back({Does::kScaleGrad, dice.below(64), dice.between(0.3, 1.5)});
    }
    actions.push_back({Does::kBackward, dice.one_in(6) ? 1 : 0, 1});
  }
}

// Between an accumulator's last backward and its step.
void add_changes_of_sums(Dice& dice, std::vector<Action>& actions, bool pipelines, bool has_slices,
                         bool may_overflow) {
  const int which = dice.below(64);
  if (dice.one_in(8)) actions.push_back({Does::kScaleGrad, which, dice.between(0.3, 1.5)});
  if (dice.one_in(12)) actions.push_back({Does::kZeroOneGrad, which, 1});
  // A rank of a pipeline sees the norm of its stages.
  if (!pipelines && dice.one_in(8)) actions.push_back({Does::kReadNorm, 0, 1});
  if (!pipelines && dice.one_in(12)) actions.push_back({Does::kDropGrad, which, 1});
  if (!pipelines && dice.one_in(12)) {
    actions.push_back({Does::kSetGrad, which, dice.between(-0.5, 0.5)});
  }
  // A norm that is not finite is refused.
  const bool is_infinite = std::any_of(actions.begin(), actions.end(), [](const Action& action) {
    return action.does == Does::kInfinite;
  });
  if (!is_infinite && !may_overflow && dice.one_in(4)) {
    const int by_torch = pipelines || has_slices ? 0 : dice.below(2);
    actions.push_back({Does::kClip, by_torch, dice.between(0.05, 1.5)});
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
                            bool may_throw, int settings) {
  const int which = dice.below(64);
  if (dice.one_in(8)) actions.push_back({Does::kLearningRate, which, dice.between(0.3, 1.2)});
  if (dice.one_in(6)) actions.push_back({Does::kSchedule, dice.below(2), dice.between(0, 1)});
  if (dice.one_in(12)) actions.push_back({Does::kFreeze, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kUnfreeze, which, 1});
  if (dice.one_in(6)) actions.push_back({Does::kEvaluate, 0, 1});
  if (may_throw && dice.one_in(12)) actions.push_back({Does::kThrow, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kWriteGuarded, which, dice.between(0.5, 1.5)});
  if (dice.one_in(12)) actions.push_back({Does::kWriteAlike, which, dice.between(0.5, 1.5)});
  if (dice.one_in(4)) actions.push_back({Does::kAverage, 0, 1});
  if (dice.one_in(10)) actions.push_back({Does::kSeeAverage, 0, 1});
  if (may_resume && dice.one_in(6)) actions.push_back({Does::kResume, dice.below(settings), 1});
}

// Somewhere, and two steps after it, in which it must be noticed.
void add_a_wrong_one(Dice& dice, Script& script, bool pipelines) {
  const bool accumulates = script.accumulation.is_on;
  auto does = dice.any_of({Does::kOwnLearningRate, Does::kOwnWrite, Does::kOwnLeftStep});
  if (accumulates && does == Does::kOwnLeftStep) does = Does::kOwnWrite;
  // A rank that has some of the experts alone may write to them.
  if (spreads_experts(script) && does == Does::kOwnWrite) does = Does::kOwnLearningRate;
  std::vector<Action>& actions = script.actions;
  const auto place = dice.below(static_cast<int>(actions.size()) + 1);
  actions.insert(actions.begin() + place, {does, dice.below(64), dice.between(0.3, 0.8)});
  for (int step = 0; step < 2; ++step) {
    if (!accumulates) actions.push_back({Does::kZeroGrad, 0, 1});
    if (accumulates) actions.push_back({Does::kMicroBatches, pipelines ? 6 : 1, 1});
    if (!accumulates) actions.push_back({Does::kBackward, 0, 1});
    actions.push_back({Does::kStep, 0, 1});
  }
}

void add_settings(Dice& dice, Script& script, bool pipelines) {
  script.settings.push_back(random_setting(dice, script, pipelines));
  if (!dice.one_in(2)) return;
  const bool again = pipelines && !dice.one_in(2);
  script.settings.push_back(random_setting(dice, script, again));
}

// What a run is compared with, in which values: fp32 is not far from half of bf16, so that has its own bits beside.
void choose_values(Dice& dice, Script& script) {
  script.values = dice.any_of({Values::kDouble, Values::kDouble, Values::kDouble, Values::kDouble,
                               Values::kFloat, Values::kFloat, Values::kBFloat16, Values::kHalf});
  const bool is_low = script.values == Values::kBFloat16 || script.values == Values::kHalf;
  if (is_low || dice.one_in(4)) script.beside = Beside::kTwin;
}

// The optimizer alone is ours in some settings, which are of stages 0 and 1 then.
void leave_the_wrapper_out(Dice& dice, Script& script) {
  const bool is_low = script.values == Values::kBFloat16 || script.values == Values::kHalf;
  if (is_low || script.optimizers > 1 || has_buffers(script)) return;
  // Without the wrapper a parameter's number is that among the groups' parameters.
  if (script.states != StateFormat::kFp32 || script.is_world_invariant) return;
  for (Setting& setting : script.settings) {
    if (setting.tensor > 1 || dice.one_in(3)) continue;
    setting.is_alone = true;
    set_stage(setting, std::min(setting.stage, 1));
  }
}

// Rounded at random by the seed, the step and the element, so they have a twin.
void choose_states(Dice& dice, Script& script) {
  if (script.values == Values::kDouble || script.beside != Beside::kTwin) return;
  // A stage rounds a parameter by its number and its place there.
  if (script.rule == Rule::kAdafactor || script.has_pipelines || !dice.one_in(3)) return;
  script.states = dice.any_of({StateFormat::kBf16, StateFormat::k8Bit});
}

// What low precision is made of, where a twin has the same.
void choose_low_precision(Dice& dice, Script& script) {
  const bool is_bfloat16 = script.values == Values::kBFloat16;
  if (!is_bfloat16 && script.values != Values::kHalf) return;
  script.sends_floats = dice.one_in(4);
  // fp16 is multiplied by a loss scale, and nobody can look at it then.
  script.keeps_low = is_bfloat16 && dice.one_in(4);
  if (!is_bfloat16 || !dice.one_in(3)) return;
  // What leaves the device has masters.
  script.masters = script.has_pipelines || dice.one_in(2) ? LowPrecisionUpdate::kSplitMasterWeights
                                                          : LowPrecisionUpdate::kStochasticRounding;
  if (reads_whole_tensors(script.rule)) script.rule = Rule::kAdam;
  for (Setting& setting : script.settings) {
    setting.optimizer = setting.parameters = Tier::kDevice;
    setting.offloaded_bytes = 0;
  }
}

// Sums as one tree over ranks and micro-batches.
void choose_world_invariance(Dice& dice, Script& script) {
  const bool is_low = script.values == Values::kBFloat16;
  if (!script.accumulation.is_on || script.has_pipelines) return;
  if (script.values != Values::kFloat && !is_low) return;
  if (!dice.one_in(3)) return;
  script.is_world_invariant = true;
  script.sends_floats = script.keeps_low = false;
  for (Setting& setting : script.settings) {
    if (setting.data == 3) setting.data = 2;
    setting.shard_within = 0;
    setting.reduced = ReduceMicroSteps::kAuto;
    setting.gradient_budget_bytes = 0;
  }
}

// A step in backward or late needs an optimizer that leaves the device. A loss scale that changes, as in fp16, looks at all gradients.
void choose_when(Dice& dice, Script& script) {
  if (script.values == Values::kDouble || script.values == Values::kHalf) return;
  if (script.masters != LowPrecisionUpdate::kMasterWeights) return;
  const bool is_late = dice.one_in(3);
  if (reads_whole_tensors(script.rule)) script.rule = Rule::kAdamW;
  script.optimizers = 1;
  script.accumulation.clip_norm = script.accumulation.clip_value = 0;
  // One step late no state can be saved.
  if (is_late) script.settings.resize(1);
  for (Setting& setting : script.settings) {
    setting.is_by_class = false;
    setting.when = is_late ? StepWhen::kOneStepLate : StepWhen::kInBackward;
    if (setting.optimizer == Tier::kDevice || is_late) setting.optimizer = Tier::kHost;
    if (is_late) setting.parameters = Tier::kDevice;
    if (is_late) setting.offloaded_bytes = 0;
  }
}

void choose_accumulation(Dice& dice, Accumulation& of) {
  of.is_on = true;
  of.weighs = dice.one_in(3);
  if (dice.one_in(3)) of.clip_norm = dice.between(0.05, 1.5);
  if (of.clip_norm == 0 && dice.one_in(4)) of.clip_value = dice.between(0.005, 0.2);
}

// The step is made in the backward, or one step late: nothing looks at gradients between the two, or nothing changes what
// the update beside reads.
void add_a_step_without_a_look(Dice& dice, Script& script, int step) {
  std::vector<Action>& actions = script.actions;
  const int which = dice.below(64);
  if (script.accumulation.is_on) {
    actions.push_back({Does::kMicroBatches, 1 + dice.below(3), 1});
  } else {
    // Gradients that backward has freed are dropped, and not written to.
    const bool is_late = when_of(script) == StepWhen::kOneStepLate;
    if (step > 0)
      actions.push_back({Does::kZeroGrad, is_late ? dice.below(4) : 2 * dice.below(2), 1});
    actions.push_back({Does::kBackward, dice.one_in(6) ? 1 : 0, dice.between(0.3, 2)});
  }
  actions.push_back({Does::kStep, 0, 1});
  if (dice.one_in(6)) actions.push_back({Does::kEvaluate, 0, 1});
  if (dice.one_in(8)) actions.push_back({Does::kLearningRate, which, dice.between(0.3, 1.2)});
  if (dice.one_in(6)) actions.push_back({Does::kSchedule, dice.below(2), dice.between(0, 1)});
  if (when_of(script) == StepWhen::kOneStepLate) return;
  if (dice.one_in(12)) actions.push_back({Does::kFreeze, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kUnfreeze, which, 1});
  if (dice.one_in(12)) actions.push_back({Does::kWriteGuarded, which, dice.between(0.5, 1.5)});
  if (dice.one_in(12)) actions.push_back({Does::kWriteAlike, which, dice.between(0.5, 1.5)});
  if (dice.one_in(4)) actions.push_back({Does::kAverage, 0, 1});
  const auto settings = static_cast<int>(script.settings.size());
  if (dice.one_in(4)) actions.push_back({Does::kResume, dice.below(settings), 1});
}

void add_a_step(Dice& dice, Script& script, int step, bool pipelines, bool has_slices) {
  std::vector<Action>& actions = script.actions;
  const auto settings = static_cast<int>(script.settings.size());
  const bool is_single = script.optimizers == 1;
  if (script.accumulation.is_on) {
    add_micro_batches(dice, actions, pipelines);
    // Where neither a step nor an end comes, the next micro-batches are the open step's, and gradients are no sum yet.
    const int what = pipelines ? 1 + dice.below(11) : dice.below(12);
    if (what == 0) return;
    add_changes_of_sums(dice, actions, pipelines, has_slices, script.values == Values::kHalf);
    actions.push_back({what == 1 ? Does::kAbandon : Does::kStep, 0, 1});
    add_changes_of_the_run(dice, actions, is_single, /*may_throw=*/!pipelines, settings);
    return;
  }
  if (step > 0 && !dice.one_in(10)) actions.push_back({Does::kZeroGrad, dice.below(4), 1});
  add_backwards(dice, actions);
  add_changes_of_gradients(dice, actions, has_slices);
  const bool steps_now = !dice.one_in(12);
  if (steps_now) actions.push_back({Does::kStep, 0, 1});
  add_changes_of_the_run(dice, actions, steps_now && is_single, /*may_throw=*/true, settings);
}

// Until a group of them is added. A state has the groups that there were.
void leave_parameters_out(Dice& dice, Script& script) {
  const bool is_alone = std::any_of(script.settings.begin(), script.settings.end(),
                                    [](const Setting& setting) { return setting.is_alone; });
  if (script.has_pipelines || is_alone || when_of(script) == StepWhen::kOneStepLate) return;
  script.left_out = 1 + dice.below(3);
  // LibTorch's makes its states in the constructor alone.
  if (script.rule == Rule::kAdagrad) script.rule = Rule::kAdam;
  std::vector<Action>& actions = script.actions;
  std::erase_if(actions, [](const Action& action) { return action.does == Does::kResume; });
  for (Action& action : actions) {
    // LibTorch's plateau knows the groups that there were.
    if (action.does == Does::kSchedule) action.which = 0;
    // A step in backward frees gradients of others, too.
    const bool frees = when_of(script) == StepWhen::kInBackward;
    if (frees && action.does == Does::kZeroGrad) action.which = 2;
  }
  // Between two steps.
  std::vector<size_t> places;
  for (size_t at = 0; at < actions.size(); ++at) {
    if (actions[at].does == Does::kStep) places.push_back(at + 1);
  }
  if (places.empty()) return;
  const size_t place = places[static_cast<size_t>(dice.below(static_cast<int>(places.size())))];
  actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(place), {Does::kAddGroup, 0, 1});
}

}  // namespace

Script random_script(uint64_t seed) {
  Dice dice(seed);
  Script script;
  script.seed = seed;
  choose_values(dice, script);
  const bool pipelines = script.has_pipelines = dice.one_in(4);
  script.has_context = !pipelines && script.values != Values::kHalf && dice.one_in(5);
  if (pipelines || dice.one_in(3)) choose_accumulation(dice, script.accumulation);
  script.units = random_units(dice, script.values, pipelines, script.has_context);
  // In fp32 a row of which two scores are alike may choose otherwise.
  if (has_experts(script) && script.values == Values::kFloat) script.beside = Beside::kTwin;
  script.rule = dice.any_of({Rule::kSgd, Rule::kAdam, Rule::kAdamW, Rule::kAdagrad});
  script.groups = 1 + (dice.one_in(3) ? 1 : 0);
  script.optimizers = 1 + (!pipelines && dice.one_in(6) ? 1 : 0);
  add_settings(dice, script, pipelines);
  bool has_slices = false;
  for (const Setting& setting : script.settings) has_slices = has_slices || setting.tensor > 1;
  // Rules of whole tensors are for fp32, or have masters of it.
  if (script.values != Values::kDouble && !has_slices && dice.one_in(3)) {
    script.rule = dice.any_of({Rule::kLamb, Rule::kMuon, Rule::kAdafactor});
    // Its rows and columns are those of contiguous parameters; others are refused.
    if (script.rule == Rule::kAdafactor && has(script.units, Kind::kStrided)) {
      script.rule = Rule::kLamb;
    }
    for (Setting& setting : script.settings) setting.is_by_class = false;
  }
  choose_states(dice, script);
  choose_low_precision(dice, script);
  choose_world_invariance(dice, script);
  // The fused operators take tensors of one dtype.
  script.autocasts = script.values == Values::kFloat && script.beside == Beside::kTwin &&
                     !script.has_pipelines && !has(script.units, Kind::kFused) && dice.one_in(3);
  if (!pipelines && dice.one_in(4)) leave_the_wrapper_out(dice, script);
  if (!pipelines && dice.one_in(4)) choose_when(dice, script);
  share_rows(dice, script);
  spread_experts(dice, script);
  const bool looks = when_of(script) == StepWhen::kInStep;
  const int steps = 1 + dice.below(looks ? 4 : 6);
  for (int step = 0; step < steps; ++step) {
    if (looks) add_a_step(dice, script, step, pipelines, has_slices);
    if (!looks) add_a_step_without_a_look(dice, script, step);
  }
  if (spreads_experts(script)) {
    // One rank has no whole experts to write to.
    for (Action& action : script.actions) {
      if (action.does == Does::kWriteGuarded) action.does = Does::kWriteAlike;
    }
  }
  if (dice.one_in(6)) leave_parameters_out(dice, script);
  if (looks && dice.one_in(10)) add_a_wrong_one(dice, script, pipelines);
  return script;
}

}  // namespace zeropage::scripts
