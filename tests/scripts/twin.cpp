#include "tests/scripts/twin.h"

namespace zeropage::scripts {

Script twin_of(Script script) {
  for (Setting& setting : script.settings) {
    // Sums in the order that it had.
    if (setting.reduced == ReduceMicroSteps::kAuto && !script.is_world_invariant) {
      setting.reduced = setting.stage < 2 ? ReduceMicroSteps::kOnce : ReduceMicroSteps::kEach;
    }
    set_stage(setting, 0);
    // One rank runs the micro-batches of all. It has no masks of theirs, and its buffers are written by all.
    if (script.is_world_invariant && !has_buffers(script) && !has(script, Kind::kMasked) &&
        !has(script, Kind::kTightExperts)) {
      setting.spread = setting.data;
      setting.data = 1;
    }
    setting.optimizer = Tier::kDevice;
    setting.offloaded_bytes = 0;
    // What is one step late has other results.
    if (setting.when == StepWhen::kOneStepLate) setting.optimizer = Tier::kHost;
    if (setting.when == StepWhen::kInBackward) setting.when = StepWhen::kInStep;
    setting.kept = Kept::kAll;
    // By whose blocks states in 8 bits are quantised.
    if (script.states != StateFormat::k8Bit) setting.page_bytes = 1 << 20;
    setting.is_alone = setting.is_deferred = setting.saves_aside = setting.parks = false;
    // That takes any number of micro-batches.
    setting.order = setting.chunks > 1 ? ScheduleKind::kInterleaved : ScheduleKind::kGPipe;
    if (has_ties(script) || setting.tensor > 1) continue;
    setting.pipeline = setting.chunks = 1;
    setting.order = ScheduleKind::kGPipe;
  }
  return script;
}

}  // namespace zeropage::scripts
