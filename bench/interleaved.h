// Times contenders one after the other, round by round, with Google Benchmark.
//
// Google Benchmark chooses how often each runs in a round. Its repetitions are not used: they run one after
// the other, or shuffled among all benchmarks, and a ratio needs neighbours.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "bench/spread.h"

namespace bench {

struct Contender {
  std::string name;
  std::function<void()> run;  // once; queued, where the device has a stream
  // Before each run, and not timed; each run is then waited for by itself, and a round has ten: it may take far
  // longer than what is timed. Empty: runs follow each other.
  std::function<void()> prepare = {};
};

// Seconds of each contender in every round. Runs each once before.
std::vector<Spread> time_interleaved(const std::vector<Contender>& all, const c10::Device& device,
                                     int rounds);

// What times itself.
struct TimedContender {
  std::string name;
  std::function<double(int64_t runs)> seconds_of;  // so many, one after the other
  int64_t runs = 0;                                // in a round; 0: as many as take 0.05 s
};

// Seconds of one run of each contender in every round.
std::vector<Spread> time_interleaved(const std::vector<TimedContender>& all, int rounds);

}  // namespace bench
