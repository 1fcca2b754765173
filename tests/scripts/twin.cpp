#include "tests/scripts/twin.h"

namespace zeropage::scripts {

Script twin_of(Script script) {
  for (Setting& setting : script.settings) {
    // Sums in the order that it had.
    if (setting.reduced == Reduced::kAuto && !script.is_world_invariant) {
      setting.reduced = setting.stage < 2 ? Reduced::kOnce : Reduced::kEach;
    }
    set_stage(setting, 0);
    // One rank runs the micro-batches of all. It has no masks of theirs, and its buffers are written by all.
    if (script.is_world_invariant && !has_buffers(script) && !has(script, Kind::kMasked)) {
      setting.spread = setting.data;
      setting.data = 1;
    }
    setting.optimizer = Left::kDevice;
    setting.offloaded_bytes = 0;
    // What is one step late has other results.
    if (setting.when == When::kOneStepLate) setting.optimizer = Left::kHost;
    if (setting.when == When::kInBackward) setting.when = When::kInStep;
    setting.kept = Kept::kAll;
    // By whose blocks states in 8 bits are quantised.
    if (script.states != States::kEightBits) setting.page_bytes = 1 << 20;
    setting.is_alone = setting.is_deferred = setting.saves_aside = false;
    // That takes any number of micro-batches.
    setting.order = setting.chunks > 1 ? Order::kInterleaved : Order::kGPipe;
    if (has_ties(script) || setting.tensor > 1) continue;
    setting.pipeline = setting.chunks = 1;
    setting.order = Order::kGPipe;
  }
  return script;
}

}  // namespace zeropage::scripts
