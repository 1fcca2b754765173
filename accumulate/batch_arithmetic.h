// Solves global_batch = micro_batch * accumulation * ranks for the sizes that are not given.
//
//   auto sizes = accumulate::solve_batch({.global_batch = 1024, .micro_batch = 8, .ranks = 4});
//   sizes.accumulation;  // 32
//
// Pure functions of integers.
#pragma once

#include <cstdint>
#include <optional>

namespace zeropage::accumulate {

// What is given, in samples, micro-steps and ranks; each at least 1.
struct BatchSizes {
  std::optional<int64_t> global_batch;  // samples of one optimizer step, on all ranks
  std::optional<int64_t> micro_batch;   // samples of one forward and backward on one rank
  std::optional<int64_t> accumulation;  // micro-steps of one optimizer step
  std::optional<int64_t> ranks;
};

struct SolvedBatch {
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t accumulation = 0;
  int64_t ranks = 0;

  bool operator==(const SolvedBatch&) const = default;
};

// Fills in what is not given. What the rest does not determine is 1: ranks first, then
// accumulation, then micro_batch.
// Throws c10::Error on fewer than two sizes, on a size below 1, on a product past int64, and on
// sizes that do not fit together, then with the nearest that do. (Where global_batch is past 2^40
// only the nearest global batches are named.)
SolvedBatch solve_batch(const BatchSizes& given);

}  // namespace zeropage::accumulate
