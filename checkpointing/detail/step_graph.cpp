#include "checkpointing/detail/step_graph.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "zeropage/check.h"

namespace zeropage::checkpointing::detail {
namespace {

bool is_saved(const RecordedStep& step, size_t value) {
  return step.values[value].retention != Retention::kPassing;
}

void check_tick(const RecordedStep& step, size_t tick, const std::vector<size_t>& saves) {
  const auto& [event, value, other_bytes] = step.ticks[tick];
  ZP_CHECK(other_bytes >= 0, "recorded step: tick ", tick, ": expected 0 or more other bytes, got ",
           other_bytes, "; what counts as a saved value must not be taken off twice");
  ZP_CHECK(is_saved(step, value), "recorded step: tick ", tick,
           ": expected a saved value, got value ", value,
           ", which passes; mark it as saved or leave the tick out");
  const bool was_saved = saves[value] != kNone;
  ZP_CHECK(was_saved == (event != Event::kSave), "recorded step: tick ", tick, ": value ", value,
           was_saved ? " is saved a second time; give its first save alone"
                     : " is used before its save; give the save where forward makes it");
}

void check_step(const RecordedStep& step) {
  const size_t values = step.values.size();
  for (size_t op = 0; op < step.operators.size(); ++op) {
    for (const size_t input : step.operators[op].inputs) {
      ZP_CHECK(input < values, "recorded step: operator ", op, " (", step.operators[op].signature,
               "): expected inputs below ", values, ", got ", input,
               "; add the value to RecordedStep::values");
    }
  }
  std::vector<size_t> saves(values, kNone);
  for (size_t tick = 0; tick < step.ticks.size(); ++tick) {
    const size_t value = step.ticks[tick].value;
    ZP_CHECK(value < values, "recorded step: tick ", tick, ": expected a value below ", values,
             ", got ", value, "; add the value to RecordedStep::values");
    check_tick(step, tick, saves);
    if (step.ticks[tick].event == Event::kSave) saves[value] = tick;
  }
  for (size_t value = 0; value < values; ++value) {
    const RecordedValue& recorded = step.values[value];
    ZP_CHECK(recorded.bytes >= 0, "recorded step: value ", value,
             ": expected 0 or more bytes, got ", recorded.bytes, "; give its storage's size");
    ZP_CHECK(recorded.producer == kLeaf || recorded.producer < step.operators.size(),
             "recorded step: value ", value, ": expected a producer below ", step.operators.size(),
             " or checkpointing::kLeaf, got ", recorded.producer,
             "; add the operator to RecordedStep::operators");
    ZP_CHECK(!is_saved(step, value) || saves[value] != kNone, "recorded step: value ", value,
             ": expected a tick that saves it, got none; add one where forward makes it");
  }
}

}  // namespace

StepGraph::StepGraph(const RecordedStep& step) : step_(step) {
  check_step(step);
  const size_t operators = step.operators.size();
  inputs_.resize(operators);
  outputs_.resize(operators);
  output_bytes_.resize(operators);
  for (size_t op = 0; op < operators; ++op) {
    inputs_[op] = step.operators[op].inputs;
    std::sort(inputs_[op].begin(), inputs_[op].end());
    inputs_[op].erase(std::unique(inputs_[op].begin(), inputs_[op].end()), inputs_[op].end());
  }
  for (size_t value = 0; value < step.values.size(); ++value) {
    const size_t producer = step.values[value].producer;
    if (producer == kLeaf) continue;
    outputs_[producer].push_back(value);
    output_bytes_[producer] += step.values[value].bytes;
  }
  average_seconds();
  find_droppable();
  index_ticks();
}

void StepGraph::average_seconds() {
  std::map<std::string_view, std::pair<double, int64_t>> sums;
  for (const RecordedOperator& op : step_.operators) {
    auto& [seconds, count] = sums[op.signature];
    seconds += op.seconds;
    ++count;
  }
  seconds_.reserve(step_.operators.size());
  for (const RecordedOperator& op : step_.operators) {
    const auto& [seconds, count] = sums[op.signature];
    seconds_.push_back(seconds / static_cast<double>(count));
  }
}

void StepGraph::find_droppable() {
  std::vector<uint8_t> replayable(step_.operators.size());
  for (size_t op = 0; op < step_.operators.size(); ++op) {
    replayable[op] = step_.operators[op].replayable ? 1 : 0;
    for (const size_t input : inputs_[op]) {
      const RecordedValue& value = step_.values[input];
      if (value.producer == kLeaf) continue;
      // What writes to its input cannot read that input again.
      const bool overwritten = value.producer >= op;
      const bool lost = !saved(input) && (overwritten || replayable[value.producer] == 0);
      if (overwritten || lost) replayable[op] = 0;
    }
  }
  droppable_.resize(step_.values.size());
  for (size_t value = 0; value < step_.values.size(); ++value) {
    const auto& [bytes, producer, retention] = step_.values[value];
    droppable_[value] =
        retention == Retention::kSaved && producer != kLeaf && replayable[producer] != 0 ? 1 : 0;
  }
}

void StepGraph::index_ticks() {
  const size_t ticks = step_.ticks.size();
  save_tick_.assign(step_.values.size(), kNone);
  last_tick_.assign(step_.values.size(), ticks == 0 ? 0 : ticks - 1);
  needed_.assign(step_.operators.size(), 0);
  std::vector<uint8_t> needed(step_.values.size(), 0);
  std::vector<size_t> last_event(step_.values.size(), 0);
  std::vector<uint8_t> released(step_.values.size(), 0);
  for (size_t tick = 0; tick < ticks; ++tick) {
    const auto& [event, value, other_bytes] = step_.ticks[tick];
    last_event[value] = tick;
    if (event == Event::kSave) save_tick_[value] = tick;
    if (event == Event::kRelease) released[value] = 1;
    if (event == Event::kNeed && needed[value] == 0) {
      needed[value] = 1;
      if (!droppable(value)) continue;
      first_needs_.push_back({tick, value});
      needed_[step_.values[value].producer] = 1;
    }
  }
  for (size_t value = 0; value < step_.values.size(); ++value) {
    if (released[value] != 0) last_tick_[value] = last_event[value];
  }
}

double StepGraph::lone_seconds(size_t op) const {
  if (needed_[op] == 0) return 0;
  std::vector<size_t> found = {op};
  for (size_t next = 0; next < found.size(); ++next) {
    for (const size_t input : inputs_[found[next]]) {
      const size_t producer = step_.values[input].producer;
      const bool known = std::find(found.begin(), found.end(), producer) != found.end();
      if (producer != kLeaf && !saved(input) && !known) found.push_back(producer);
    }
  }
  return std::accumulate(found.begin(), found.end(), 0.0,
                         [&](double sum, size_t each) { return sum + seconds_[each]; });
}

}  // namespace zeropage::checkpointing::detail
