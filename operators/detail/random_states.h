// States of random generators as values: what a draw begins with and what it leaves.
//
// While recording nothing is drawn, so a generator's real state would say nothing about how many
// draws lie behind it. Instead each state has a number, and a RandomRecorder writes that number
// into the generator's engine as a mark. Whatever the constructor does to a generator then shows:
// a mark is a state of the recording, also one that was saved and restored or copied into another
// generator; anything else is a state that the constructor set, and is kept as it is.
//
// Lifetime: a recorder refers to the states that it fills.
// Threads: one; RandomRecorder::mutex() is held where the default generator carries marks or
// somebody else's state.
// Throws c10::Error for generators of other devices, and for draws without an operator.
#pragma once

#include <mutex>
#include <vector>

#include <ATen/core/Generator.h>

namespace zeropage::operators::detail {

struct RandomStates {
  struct State {
    at::Generator constant;  // its state; undefined where a draw leaves the state
    size_t seeded;           // the constant that the draws before it began with
  };
  struct Tracked {
    at::Generator generator;
    size_t last = 0;  // the state in which the constructor leaves it
  };

  // The generator's state when the recording was over.
  const at::Generator& left_at(const Tracked& tracked) const {
    return states[states[tracked.last].seeded].constant;
  }

  std::vector<State> states;
  std::vector<Tracked> generators;
};

class RandomRecorder {
 public:
  explicit RandomRecorder(RandomStates& states) : states_(states) {}
  // Takes the marks away.
  ~RandomRecorder();
  RandomRecorder(const RandomRecorder&) = delete;
  RandomRecorder& operator=(const RandomRecorder&) = delete;

  // Guards the default generator against another recording or replay of this process.
  static std::mutex& mutex();

  // The number of the state that the generator has now.
  size_t state_of(const at::Generator& generator);
  // A draw that began with state `before` ends: the number of the state that it leaves.
  size_t after_draw(const at::Generator& generator, size_t before);
  // Notes in which state the constructor left the generators.
  void finish();

 private:
  RandomStates& states_;
};

}  // namespace zeropage::operators::detail
