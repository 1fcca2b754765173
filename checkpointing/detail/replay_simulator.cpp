#include "checkpointing/detail/replay_simulator.h"

#include <algorithm>

namespace zeropage::checkpointing::detail {

ReplaySimulator::ReplaySimulator(const StepGraph& graph)
    : graph_(graph), schedule_(graph), last_reader_(graph.step().values.size()) {}

Outcome ReplaySimulator::run(const Decision& dropped) {
  ++runs_;
  schedule_.lay_out(dropped);
  lay_out_lifetimes(dropped);

  Outcome outcome;
  int64_t live_bytes = 0;
  const auto reach = [&](int64_t bytes, size_t tick) {
    if (bytes <= outcome.peak_bytes) return;
    outcome.peak_bytes = bytes;
    outcome.peak_tick = tick;
  };
  const std::vector<Tick>& ticks = graph_.step().ticks;
  const std::vector<Replay>& replays = schedule_.replays();
  size_t next = 0;
  for (size_t tick = 0; tick < ticks.size(); ++tick) {
    live_bytes += change_[tick];
    const int64_t other_bytes = ticks[tick].other_bytes;
    reach(live_bytes + other_bytes, tick);
    if (next == replays.size() || replays[next].tick != tick) continue;
    // The moment of the replay belongs to the time before the tick and to the time after it: what
    // else is alive then is below both peaks.
    const size_t after = std::min(tick + 1, ticks.size() - 1);
    const int64_t meanwhile_bytes = std::min(other_bytes, ticks[after].other_bytes);
    reach(live_bytes + meanwhile_bytes + replay_peak(replays[next], next), tick);
    ++next;
  }
  for (const size_t op : schedule_.operators()) outcome.replay_seconds += graph_.seconds(op);
  return outcome;
}

std::vector<size_t> ReplaySimulator::replays() const {
  std::vector<size_t> counts(graph_.step().operators.size(), 0);
  for (const size_t op : schedule_.operators()) ++counts[op];
  return counts;
}

void ReplaySimulator::lay_out_lifetimes(const Decision& dropped) {
  const RecordedStep& step = graph_.step();
  change_.assign(step.ticks.size() + 1, 0);
  for (size_t value = 0; value < step.values.size(); ++value) {
    if (!graph_.saved(value)) continue;
    const int64_t bytes = step.values[value].bytes;
    const size_t save = graph_.save_tick(value);
    if (dropped[value] == 0) {
      add_lifetime(save, schedule_.alive_until(value), bytes);
      continue;
    }
    add_lifetime(save, std::min(save + kLingerTicks, graph_.last_tick(value)), bytes);
    if (schedule_.brought_by(value) == kNone) continue;
    // In the replay itself it counts as one of the replay's outputs.
    const size_t brought = schedule_.replays()[schedule_.brought_by(value)].tick;
    const size_t until = schedule_.alive_until(value);
    if (until > brought) add_lifetime(brought + 1, until, bytes);
  }
}

void ReplaySimulator::add_lifetime(size_t first_tick, size_t last_tick, int64_t bytes) {
  change_[first_tick] += bytes;
  change_[std::min(last_tick + 1, graph_.step().ticks.size())] -= bytes;
}

// The most that the replay's own outputs take at once.
int64_t ReplaySimulator::replay_peak(const Replay& replay, size_t number) {
  const std::vector<RecordedValue>& values = graph_.step().values;
  const std::vector<size_t>& operators = schedule_.operators();
  const auto reads_own = [&](size_t input) {
    const size_t producer = values[input].producer;
    if (producer == kLeaf) return false;
    return graph_.saved(input) ? schedule_.brought_by(input) == number : true;
  };
  for (size_t at = replay.begin; at < replay.end; ++at) {
    for (const size_t output : graph_.outputs(operators[at])) last_reader_[output] = kNone;
    for (const size_t input : graph_.inputs(operators[at])) {
      if (reads_own(input)) last_reader_[input] = operators[at];
    }
  }
  const auto stays = [&](size_t value) {
    return schedule_.brought_by(value) == number && schedule_.alive_until(value) > replay.tick;
  };
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  for (size_t at = replay.begin; at < replay.end; ++at) {
    const size_t op = operators[at];
    live_bytes += graph_.output_bytes(op);
    peak_bytes = std::max(peak_bytes, live_bytes);
    for (const size_t output : graph_.outputs(op)) {
      if (last_reader_[output] == kNone && !stays(output)) {
        live_bytes -= values[output].bytes;
      }
    }
    for (const size_t input : graph_.inputs(op)) {
      if (reads_own(input) && last_reader_[input] == op && !stays(input)) {
        live_bytes -= values[input].bytes;
      }
    }
  }
  return peak_bytes;
}

}  // namespace zeropage::checkpointing::detail
