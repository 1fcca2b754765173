// Recorded steps that no model ran: chains, transformers and random graphs.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checkpointing/recompute_plan.h"

namespace zeropage::checkpointing {

// Runs operators of one output each; then backward, in reverse, where each operator needs what it
// saved, and what no earlier one saved is released.
class SyntheticStep {
 public:
  size_t leaf(int64_t bytes) {
    step_.values.push_back({.bytes = bytes});
    return step_.values.size() - 1;
  }

  size_t run(const std::string& signature, double seconds, std::vector<size_t> inputs,
             int64_t bytes) {
    const size_t op = step_.operators.size();
    step_.operators.push_back(
        {.signature = signature, .seconds = seconds, .inputs = std::move(inputs)});
    saves_.emplace_back();
    step_.values.push_back({.bytes = bytes, .producer = op});
    return step_.values.size() - 1;
  }

  // The operator that ran last saves it.
  void save(size_t value) { saves_.back().push_back(value); }
  RecordedStep& step() { return step_; }

  RecordedStep finish(int64_t other_bytes) {
    std::vector<size_t> first_saver(step_.values.size(), saves_.size());
    for (size_t op = saves_.size(); op-- > 0;) {
      for (const size_t value : saves_[op]) {
        first_saver[value] = op;
        auto& retention = step_.values[value].retention;
        if (retention == Retention::kPassing) retention = Retention::kSaved;
      }
    }
    const auto add = [&](Event event, size_t value) {
      step_.ticks.push_back({.event = event, .value = value, .other_bytes = other_bytes});
    };
    for (size_t value = 0; value < step_.values.size(); ++value) {
      if (step_.values[value].retention != Retention::kPassing) add(Event::kSave, value);
    }
    for (size_t op = saves_.size(); op-- > 0;) {
      for (const size_t value : saves_[op]) add(Event::kNeed, value);
      for (const size_t value : saves_[op]) {
        if (first_saver[value] == op) add(Event::kRelease, value);
      }
    }
    return step_;
  }

 private:
  RecordedStep step_;
  std::vector<std::vector<size_t>> saves_;  // [operators]
};

// Pre-norm blocks: 16 units of saved values each, 12.7 seconds of forward, of which 12 in matmuls.
inline constexpr double kBlockSeconds = 12.7;
inline RecordedStep transformer(size_t blocks, int64_t unit = 1 << 20) {
  SyntheticStep step;
  size_t stream = step.run("embedding", 0.1, {step.leaf(unit)}, unit);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t norm1 = step.run("norm", 0.1, {stream}, unit);
    step.save(stream);
    const size_t qkv = step.run("qkv", 3, {norm1, step.leaf(unit)}, 3 * unit);
    step.save(norm1);
    const size_t attention = step.run("attention", 0.1, {qkv}, unit);
    step.save(qkv);
    step.save(attention);
    const size_t projected = step.run("projection", 1, {attention, step.leaf(unit)}, unit);
    step.save(attention);
    const size_t middle = step.run("add", 0.1, {stream, projected}, unit);
    const size_t norm2 = step.run("norm", 0.1, {middle}, unit);
    step.save(middle);
    const size_t up = step.run("up", 4, {norm2, step.leaf(unit)}, 4 * unit);
    step.save(norm2);
    const size_t gelu = step.run("gelu", 0.1, {up}, 4 * unit);
    step.save(up);
    const size_t down = step.run("down", 4, {gelu, step.leaf(unit)}, unit);
    step.save(gelu);
    stream = step.run("add", 0.1, {middle, down}, unit);
  }
  step.run("norm", 0.1, {stream}, unit);
  step.save(stream);
  return step.finish(4 * unit);
}

// Streams of equal values, each of them made from all values of the layer before, perhaps through
// passing ones.
inline RecordedStep streams(size_t count, size_t layers, int64_t bytes, bool through_passing) {
  SyntheticStep step;
  std::vector<size_t> layer(count, step.leaf(bytes));
  for (size_t at = 0; at < layers; ++at) {
    std::vector<size_t> next;
    for (size_t stream = 0; stream < count; ++stream) {
      std::vector<size_t> inputs = layer;
      if (through_passing) inputs = {step.run("passing", 1, layer, bytes)};
      next.push_back(step.run("stream", 1, inputs, bytes));
      step.save(next.back());
    }
    layer = next;
  }
  return step.finish(0);
}

// A chain of blocks with transformer-like irregularities: at most `most_saved` saved values of
// random sizes, some of them behind passing values, with a residual stream.
inline RecordedStep random_chain(std::mt19937& random, size_t most_saved) {
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  SyntheticStep step;
  size_t stream = step.run("embedding", 1, {step.leaf(8)}, 8 * (1 + below(2)));
  const size_t layers = 1 + below(static_cast<int64_t>(most_saved) - 2);
  const int64_t wide_bytes = 8 * (1 + below(4));
  const bool saves_wide = below(2) == 0;
  const double wide_seconds = 1 + static_cast<double>(below(4));
  size_t saved = 1;
  for (size_t layer = 0; layer < layers && saved + 3 <= most_saved; ++layer) {
    const size_t norm = step.run("norm", 0.1, {stream}, 8);
    step.save(stream);
    const size_t wide = step.run("wide", wide_seconds, {norm, step.leaf(8)}, wide_bytes);
    step.save(norm);
    if (saves_wide) step.save(wide);
    const size_t narrow = step.run("narrow", wide_seconds, {wide, step.leaf(8)}, 8);
    stream = step.run("add", 0.1, {stream, narrow}, 8);
    saved += saves_wide ? 3 : 2;
  }
  step.run("loss", 0.1, {stream}, 1);
  step.save(stream);
  return step.finish(below(16));
}

// Any graph: up to three inputs from anywhere before, any costs and sizes, each operator saving any
// of its inputs and its output.
inline RecordedStep random_graph(std::mt19937& random, size_t operators, size_t most_saved) {
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  SyntheticStep step;
  step.leaf(8);
  std::vector<size_t> saved;
  for (size_t op = 0; op < operators; ++op) {
    std::vector<size_t> inputs;
    for (int64_t count = 1 + below(3); count > 0; --count) {
      const auto made = static_cast<int64_t>(step.step().values.size());
      inputs.push_back(static_cast<size_t>(made - 1 - below(std::min<int64_t>(made, 5))));
    }
    const double seconds = 0.1 * static_cast<double>(1 + below(40));
    const int64_t bytes = 1 + below(40);
    const size_t output = step.run("operator " + std::to_string(op), seconds, inputs, bytes);
    inputs.push_back(output);
    for (const size_t value : inputs) {
      const bool is_known = std::find(saved.begin(), saved.end(), value) != saved.end();
      if (value == 0 || below(2) == 0 || (!is_known && saved.size() == most_saved)) continue;
      if (!is_known) saved.push_back(value);
      step.save(value);
    }
  }
  return step.finish(below(10));
}

}  // namespace zeropage::checkpointing
