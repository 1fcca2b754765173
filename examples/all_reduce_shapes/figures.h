// What a shape costs: measured between ranks that are threads of this process, or modelled on one rank of a world
// whose others do not exist.
//
// Model: a message takes a latency and its bytes over a bandwidth (Hockney 1994, "The communication challenge for MPP"),
// both as a ping-pong measures them here. The critical path of all shapes is rank 0's.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <zeropage/simulation.h>

#include "all_reduce_shapes/shapes.h"

namespace all_reduce_shapes {

struct Options {
  int64_t bytes = 0;   // of the tensor
  int most_ranks = 0;  // that are measured
  int repeats = 0;     // of which the fastest counts
};

struct Cost {
  int64_t busiest_bytes = 0;  // the most that a rank sends, or receives
  double seconds = 0;
};

// By shape, then by number of ranks.
using Costs = std::map<Shape, std::map<int, Cost>>;

struct Figures {
  zeropage::comm::Link link;
  Costs measured;
  Costs modelled;
};

inline constexpr int kMostModelledRanks = 1024;

// Throws where a shape does not give the sum.
Figures find(const Options& options);

std::string table(const Options& options, const Figures& figures);

}  // namespace all_reduce_shapes
