#include "tests/scripts/shrink.h"

#include <algorithm>

namespace zeropage::scripts {

bool can_be_noticed(const Script& script) {
  enum class Seen : uint8_t { kNothing, kWrong, kBackward } seen = Seen::kNothing;
  for (const Action& action : script.actions) {
    const bool is_backward = action.does == Does::kBackward ||
                             action.does == Does::kBackwardTwice ||
                             action.does == Does::kMicroBatches;
    if (is_wrong(action.does)) seen = Seen::kWrong;
    if (seen == Seen::kWrong && is_backward) seen = Seen::kBackward;
    if (seen == Seen::kBackward && action.does == Does::kStep) seen = Seen::kNothing;
  }
  return seen == Seen::kNothing;
}

Script shrunk(Script script, const std::function<bool(const Script&)>& is_still) {
  const auto try_it = [&](Script smaller) {
    if (!is_still(smaller)) return false;
    script = std::move(smaller);
    return true;
  };
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t many = std::max<size_t>(script.actions.size() / 2, 1); many > 0; many /= 2) {
      for (size_t index = script.actions.size(); index-- > 0;) {
        if (index + many > script.actions.size()) continue;
        Script smaller = script;
        const auto first = smaller.actions.begin() + static_cast<std::ptrdiff_t>(index);
        smaller.actions.erase(first, first + static_cast<std::ptrdiff_t>(many));
        progress = try_it(std::move(smaller)) || progress;
      }
    }
    // From behind, so that what others are of keeps its place.
    for (size_t index = script.units.size(); script.units.size() > 1 && index-- > 0;) {
      Script smaller = script;
      smaller.units.erase(smaller.units.begin() + static_cast<std::ptrdiff_t>(index));
      bool is_used = false;
      for (Unit& unit : smaller.units) {
        if (unit.kind != Kind::kShared && unit.kind != Kind::kTied) continue;
        is_used = is_used || unit.of == static_cast<int>(index);
        if (unit.of > static_cast<int>(index)) --unit.of;
      }
      if (!is_used) progress = try_it(std::move(smaller)) || progress;
    }
    const auto simplify = [&](const auto& change) {
      Script smaller = script;
      change(smaller);
      if (to_text(smaller) != to_text(script)) progress = try_it(std::move(smaller)) || progress;
    };
    simplify([](Script& of) { of.groups = 1; });
    simplify([](Script& of) { of.optimizers = 1; });
    simplify([](Script& of) { of.left_out = 0; });
    simplify([](Script& of) { of.rule = Rule::kSgd; });
    simplify([](Script& of) { of.states = StateFormat::kFp32; });
    simplify([](Script& of) { of.masters = LowPrecisionUpdate::kMasterWeights; });
    simplify([](Script& of) { of.sends_floats = false; });
    simplify([](Script& of) { of.keeps_low = false; });
    simplify([](Script& of) { of.is_world_invariant = false; });
    simplify([](Script& of) { of.autocasts = false; });
    simplify([](Script& of) { of.values = Values::kDouble; });
    simplify([](Script& of) { of.accumulation.weighs = false; });
    simplify([](Script& of) { of.accumulation.clip_norm = 0; });
    simplify([](Script& of) { of.accumulation.clip_value = 0; });
    simplify([](Script& of) { of.settings.resize(1); });
    for (size_t index = 0; index < script.settings.size(); ++index) {
      const auto in_setting = [&](const auto& change) {
        simplify([&](Script& of) {
          if (index < of.settings.size()) change(of.settings[index]);
        });
      };
      in_setting([](Setting& of) { of.kept = Kept::kAll; });
      in_setting([](Setting& of) { of.shard_within = 0; });
      in_setting([](Setting& of) { of.tensor = 1; });
      in_setting([](Setting& of) { of.expert = 1; });
      in_setting([](Setting& of) { of.is_by_heads = false; });
      in_setting([](Setting& of) {
        of.context = 1;
        of.is_by_heads = false;
      });
      in_setting([](Setting& of) {
        of.data = 1;
        of.shard_within = of.secondary_shard_within = 0;
      });
      // Not up again from one, or there were no end.
      in_setting([](Setting& of) {
        if (of.data <= 2) return;
        of.data = 2;
        of.shard_within = of.secondary_shard_within = 0;
      });
      in_setting([](Setting& of) {
        if (of.when == StepWhen::kInBackward) of.when = StepWhen::kInStep;
      });
      in_setting([](Setting& of) { of.is_alone = false; });
      in_setting([](Setting& of) { of.parameters = Tier::kDevice; });
      in_setting([](Setting& of) { of.optimizer = of.parameters = Tier::kDevice; });
      in_setting([](Setting& of) {
        if (of.optimizer != Tier::kDevice) of.optimizer = Tier::kHost;
        if (of.parameters != Tier::kDevice) of.parameters = Tier::kHost;
      });
      in_setting([](Setting& of) { of.reduced = ReduceMicroSteps::kAuto; });
      in_setting([](Setting& of) { of.is_deferred = false; });
      in_setting([](Setting& of) {
        of.order = ScheduleKind::kGPipe;
        of.chunks = 1;
      });
      in_setting([](Setting& of) {
        of.order = ScheduleKind::kGPipe;
        of.pipeline = of.chunks = 1;
      });
      in_setting([](Setting& of) { of.pipeline = std::min(of.pipeline, 2); });
      in_setting([](Setting& of) { set_stage(of, 0); });
      in_setting([](Setting& of) { of.stays = Reshard::kAfterUse; });
      in_setting([](Setting& of) { of.prefetch_bytes = -1; });
      in_setting([](Setting& of) { of.minimum_sharded_bytes = 0; });
      in_setting([](Setting& of) { of.secondary_shard_within = 0; });
      in_setting([](Setting& of) { of.offloaded_bytes = 0; });
      in_setting([](Setting& of) { of.gradient_budget_bytes = 0; });
      in_setting([](Setting& of) { of.is_by_class = false; });
      in_setting([](Setting& of) { of.saves_aside = false; });
      in_setting([](Setting& of) { of.parks = false; });
      in_setting([](Setting& of) { of.page_bytes = 1 << 20; });
    }
    for (size_t index = 0; index < script.actions.size(); ++index) {
      simplify([&](Script& of) {
        if (index < of.actions.size()) of.actions[index].value = 1;
      });
      simplify([&](Script& of) {
        if (index >= of.actions.size()) return;
        Action& action = of.actions[index];
        if (action.does == Does::kMicroBatches && action.which > 1) --action.which;
      });
    }
  }
  return script;
}

}  // namespace zeropage::scripts
