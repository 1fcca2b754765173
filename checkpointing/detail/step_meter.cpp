#include "checkpointing/detail/step_meter.h"

#include <algorithm>
#include <utility>

namespace zeropage::checkpointing::detail {

StepMeter::StepMeter(c10::DeviceType device) : device_(device) {
  leave_out_what_was();
}

void StepMeter::leave_out_what_was() {
  ledger_->take_recent_activation_peak(device_);
}

void StepMeter::add_operator(const Operation& operation) {
  signatures_.push_back(operation.signature);
  names_.push_back(operation.name);
  RecordedOperator recorded{.signature = std::to_string(operation.signature),
                            .replayable = operation.replayable};
  operation.for_each_input([&](const auto& value) { recorded.inputs.push_back(value->index); });
  step_.operators.push_back(std::move(recorded));
}

void StepMeter::note_seconds(const Operation& operation) {
  step_.operators[operation.index].seconds = operation.seconds;
}

void StepMeter::add_value(const Value& value) {
  const size_t producer = value.producer ? value.producer->index : kLeaf;
  step_.values.push_back({.bytes = value.bytes, .producer = producer});
  needed_.push_back(false);
}

void StepMeter::note_overwritten(const Value& value) {
  if (!value.saved) step_.values[value.index].bytes = 0;
}

void StepMeter::note_save(const Value& value, const KeptBytes& kept, bool may_be_dropped) {
  tick(Event::kSave, value, kept);
  step_.values[value.index].retention = may_be_dropped ? Retention::kSaved : Retention::kHeld;
}

void StepMeter::note_need(const Value& value, const KeptBytes& kept) {
  if (needed_[value.index]) return;
  needed_[value.index] = true;
  tick(Event::kNeed, value, kept);
}

void StepMeter::note_release(const Value& value, const KeptBytes& kept) {
  tick(Event::kRelease, value, kept);
}

void StepMeter::tick(Event event, const Value& value, const KeptBytes& kept) {
  int64_t peak = ledger_->take_recent_activation_peak(device_);
  // It was made since the tick before, and counts as saved from there on.
  if (event == Event::kSave) peak -= value.bytes;
  step_.ticks.push_back({.event = event,
                         .value = value.index,
                         .other_bytes = std::max<int64_t>(0, peak - kept.here)});
}

}  // namespace zeropage::checkpointing::detail
