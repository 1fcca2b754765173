#include "tests/scripts/twin.h"

namespace zeropage::scripts {

Script twin_of(Script script) {
  for (Setting& setting : script.settings) {
    // Sums in the order that it had.
    if (setting.reduced == Reduced::kAuto) {
      setting.reduced = setting.stage < 2 ? Reduced::kOnce : Reduced::kEach;
    }
    setting.stage = 0;
    setting.shard_within = 0;
    setting.optimizer = setting.parameters = Left::kDevice;
    // What is one step late has other results.
    if (setting.when == When::kOneStepLate) setting.optimizer = Left::kHost;
    if (setting.when == When::kInBackward) setting.when = When::kInStep;
    setting.kept = Kept::kAll;
    setting.page_bytes = 1 << 20;
    setting.is_alone = setting.is_deferred = false;
    // That takes any number of micro-batches.
    setting.order = setting.chunks > 1 ? Order::kInterleaved : Order::kGPipe;
    if (has_ties(script) || setting.tensor > 1) continue;
    setting.pipeline = setting.chunks = 1;
    setting.order = Order::kGPipe;
  }
  return script;
}

}  // namespace zeropage::scripts
