// Which tokens a rank of a context axis has: chunks r and 2 P - 1 - r of 2 P.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/TensorBody.h>

namespace zeropage::parallel::context {

// What a rank computes of its queries with the keys of one rank, in elements of their sequences, which begin at 0.
struct Block {
  int64_t first_query = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  // The keys are the queries' own: each attends to itself and those before it.
  bool is_diagonal = false;
};

// length: tokens of a rank, an even number.
Block block_of(int rank, int of_rank, int64_t length, bool is_causal);

// The positions of the rank's tokens: [whole / ranks], int64, on the host.
at::Tensor positions_of(int64_t whole, int rank, int ranks);
// Where each position of the whole is among the ranks' tokens behind each other: [whole], int64, on the host.
at::Tensor places_of_positions(int64_t whole, int ranks);

// Throws unless a sequence of that length can be split over so many ranks. who: the function.
void check_length(const char* who, int64_t whole, int ranks);

}  // namespace zeropage::parallel::context
