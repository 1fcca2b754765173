#include "parallel/context/chunks.h"

#include <vector>

#include <ATen/ATen.h>

#include "zeropage/check.h"

namespace zeropage::parallel::context {

Block block_of(int rank, int of_rank, int64_t length, bool is_causal) {
  if (!is_causal) return {.queries = length, .keys = length};
  if (rank == of_rank) return {.queries = length, .keys = length, .is_diagonal = true};
  const int64_t half = length / 2;
  // Their first chunk lies before both of this rank's, and their second one behind both.
  if (of_rank < rank) return {.queries = length, .keys = half};
  // Both of their chunks lie between this rank's.
  return {.first_query = half, .queries = length - half, .keys = length};
}

at::Tensor positions_of(int64_t whole, int rank, int ranks) {
  const int64_t chunk = whole / (2 * ranks);
  const auto chunk_at = [&](int64_t index) {
    return at::arange(index * chunk, (index + 1) * chunk, at::kLong);
  };
  return at::cat({chunk_at(rank), chunk_at(2 * ranks - 1 - rank)});
}

at::Tensor places_of_positions(int64_t whole, int ranks) {
  std::vector<at::Tensor> positions;
  for (int rank = 0; rank < ranks; ++rank) positions.push_back(positions_of(whole, rank, ranks));
  return at::argsort(at::cat(positions));
}

void check_length(const char* who, int64_t whole, int ranks) {
  ZP_CHECK(whole > 0 && whole % (2 * ranks) == 0, who, ": expected a length that is a multiple of ",
           2 * ranks, ", two chunks for each of ", ranks, " ranks, got ", whole,
           "; pad the sequence, and give padding no target");
}

}  // namespace zeropage::parallel::context
