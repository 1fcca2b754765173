#include "checkpointing/detail/replay_simulator.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "memory/check.h"

namespace zeropage::checkpointing::detail {
namespace {

constexpr size_t kNone = std::numeric_limits<size_t>::max();

}  // namespace

ReplaySimulator::ReplaySimulator(const RecordedStep& step) : step_(step) {
  check_step();
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
    if (saved(value)) saved_values_.push_back(value);
    const size_t producer = step.values[value].producer;
    if (producer == kLeaf) continue;
    outputs_[producer].push_back(value);
    output_bytes_[producer] += step.values[value].bytes;
  }
  average_seconds();
  find_droppable();
  index_ticks();
  visited_by_.resize(operators);
  last_reader_.resize(step.values.size());
}

void ReplaySimulator::check_step() const {
  const size_t values = step_.values.size();
  for (size_t op = 0; op < step_.operators.size(); ++op) {
    for (const size_t input : step_.operators[op].inputs) {
      ZP_CHECK(input < values, "recorded step: operator ", op, " (", step_.operators[op].signature,
               "): expected inputs below ", values, ", got ", input,
               "; add the value to RecordedStep::values");
    }
  }
  std::vector<size_t> saves(values, kNone);
  for (size_t tick = 0; tick < step_.ticks.size(); ++tick) {
    const size_t value = step_.ticks[tick].value;
    ZP_CHECK(value < values, "recorded step: tick ", tick, ": expected a value below ", values,
             ", got ", value, "; add the value to RecordedStep::values");
    check_tick(tick, saves);
    if (step_.ticks[tick].event == Event::kSave) saves[value] = tick;
  }
  for (size_t value = 0; value < values; ++value) {
    const RecordedValue& recorded = step_.values[value];
    ZP_CHECK(recorded.bytes >= 0, "recorded step: value ", value,
             ": expected 0 or more bytes, got ", recorded.bytes, "; give its storage's size");
    ZP_CHECK(recorded.producer == kLeaf || recorded.producer < step_.operators.size(),
             "recorded step: value ", value, ": expected a producer below ", step_.operators.size(),
             " or kLeaf, got ", recorded.producer, "; add the operator to RecordedStep::operators");
    ZP_CHECK(!saved(value) || saves[value] != kNone, "recorded step: value ", value,
             ": expected a tick that saves it, got none; add one where forward makes it");
  }
}

void ReplaySimulator::check_tick(size_t tick, const std::vector<size_t>& saves) const {
  const auto& [event, value, other_bytes] = step_.ticks[tick];
  ZP_CHECK(other_bytes >= 0, "recorded step: tick ", tick, ": expected 0 or more other bytes, got ",
           other_bytes, "; what counts as a saved value must not be taken off twice");
  ZP_CHECK(saved(value), "recorded step: tick ", tick, ": expected a saved value, got value ",
           value, ", which passes; mark it as saved or leave the tick out");
  const bool is_saved = saves[value] != kNone;
  ZP_CHECK(is_saved == (event != Event::kSave), "recorded step: tick ", tick, ": value ", value,
           is_saved ? " is saved a second time; give its first save alone"
                    : " is used before its save; give the save where forward makes it");
}

void ReplaySimulator::average_seconds() {
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

void ReplaySimulator::find_droppable() {
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

void ReplaySimulator::index_ticks() {
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

double ReplaySimulator::lone_seconds(size_t op) const {
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

Outcome ReplaySimulator::run(const Decision& dropped) {
  ++runs_;
  schedule(dropped);
  lay_out_lifetimes(dropped);

  Outcome outcome;
  int64_t live_bytes = 0;
  const auto reach = [&](int64_t bytes, size_t tick) {
    if (bytes <= outcome.peak_bytes) return;
    outcome.peak_bytes = bytes;
    outcome.peak_tick = tick;
  };
  size_t next = 0;
  for (size_t tick = 0; tick < step_.ticks.size(); ++tick) {
    live_bytes += change_[tick];
    const int64_t other_bytes = step_.ticks[tick].other_bytes;
    reach(live_bytes + other_bytes, tick);
    if (next == replays_.size() || replays_[next].tick != tick) continue;
    // The moment of the replay belongs to the time before the tick and to the time after it: what
    // else is alive then is below both peaks.
    const size_t after = std::min(tick + 1, step_.ticks.size() - 1);
    const int64_t meanwhile_bytes = std::min(other_bytes, step_.ticks[after].other_bytes);
    reach(live_bytes + meanwhile_bytes + replay_peak(replays_[next], next), tick);
    ++next;
  }
  for (const size_t op : order_) outcome.replay_seconds += seconds_[op];
  return outcome;
}

std::vector<size_t> ReplaySimulator::replays() const {
  std::vector<size_t> counts(step_.operators.size(), 0);
  for (const size_t op : order_) ++counts[op];
  return counts;
}

// Which operators run again, and when: it depends on what is there, not on bytes.
void ReplaySimulator::schedule(const Decision& dropped) {
  replays_.clear();
  order_.clear();
  alive_until_ = last_tick_;
  brought_by_.assign(step_.values.size(), kNone);
  std::fill(visited_by_.begin(), visited_by_.end(), kNone);
  for (const auto& [tick, value] : first_needs_) {
    if (dropped[value] == 0 || brought_by_[value] != kNone) continue;
    const size_t number = replays_.size();
    const size_t begin = order_.size();
    collect(step_.values[value].producer, dropped, number);
    std::sort(order_.begin() + static_cast<std::ptrdiff_t>(begin), order_.end());
    for (size_t at = begin; at < order_.size(); ++at) {
      for (const size_t output : outputs_[order_[at]]) {
        if (dropped[output] != 0 && brought_by_[output] == kNone) brought_by_[output] = number;
      }
      for (const size_t input : inputs_[order_[at]]) {
        alive_until_[input] = std::max(alive_until_[input], tick);
      }
    }
    replays_.push_back({tick, begin, order_.size()});
  }
}

void ReplaySimulator::collect(size_t op, const Decision& dropped, size_t replay) {
  stack_.assign(1, op);
  visited_by_[op] = replay;
  while (!stack_.empty()) {
    const size_t each = stack_.back();
    stack_.pop_back();
    order_.push_back(each);
    for (const size_t input : inputs_[each]) {
      const size_t producer = step_.values[input].producer;
      if (producer == kLeaf || visited_by_[producer] == replay) continue;
      const bool at_hand = saved(input) && (dropped[input] == 0 || brought_by_[input] != kNone);
      if (at_hand) continue;
      visited_by_[producer] = replay;
      stack_.push_back(producer);
    }
  }
}

void ReplaySimulator::lay_out_lifetimes(const Decision& dropped) {
  change_.assign(step_.ticks.size() + 1, 0);
  for (const size_t value : saved_values_) {
    const int64_t bytes = step_.values[value].bytes;
    const size_t save = save_tick_[value];
    if (dropped[value] == 0) {
      add_lifetime(save, alive_until_[value], bytes);
      continue;
    }
    add_lifetime(save, std::min(save + kLingerTicks, last_tick_[value]), bytes);
    if (brought_by_[value] == kNone) continue;
    // In the replay itself it counts as one of the replay's outputs.
    const size_t brought = replays_[brought_by_[value]].tick;
    if (alive_until_[value] > brought) add_lifetime(brought + 1, alive_until_[value], bytes);
  }
}

void ReplaySimulator::add_lifetime(size_t first_tick, size_t last_tick, int64_t bytes) {
  change_[first_tick] += bytes;
  change_[std::min(last_tick + 1, step_.ticks.size())] -= bytes;
}

// The most that the replay's own outputs take at once.
int64_t ReplaySimulator::replay_peak(const Replay& replay, size_t number) {
  const auto reads_own = [&](size_t input) {
    const size_t producer = step_.values[input].producer;
    if (producer == kLeaf) return false;
    return saved(input) ? brought_by_[input] == number : true;
  };
  for (size_t at = replay.begin; at < replay.end; ++at) {
    for (const size_t output : outputs_[order_[at]]) last_reader_[output] = kNone;
    for (const size_t input : inputs_[order_[at]]) {
      if (reads_own(input)) last_reader_[input] = order_[at];
    }
  }
  const auto stays = [&](size_t value) {
    return brought_by_[value] == number && alive_until_[value] > replay.tick;
  };
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  for (size_t at = replay.begin; at < replay.end; ++at) {
    const size_t op = order_[at];
    live_bytes += output_bytes_[op];
    peak_bytes = std::max(peak_bytes, live_bytes);
    for (const size_t output : outputs_[op]) {
      if (last_reader_[output] == kNone && !stays(output)) {
        live_bytes -= step_.values[output].bytes;
      }
    }
    for (const size_t input : inputs_[op]) {
      if (reads_own(input) && last_reader_[input] == op && !stays(input)) {
        live_bytes -= step_.values[input].bytes;
      }
    }
  }
  return peak_bytes;
}

}  // namespace zeropage::checkpointing::detail
