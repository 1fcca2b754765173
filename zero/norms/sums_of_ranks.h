// What ranks exchange about a step's gradients: sums of squares, weights, which are not finite, and what they
// compare; added up over the ranks that have the parts of a model.
//
// Threads: any; each call for itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optim/exact_sum.h"
#include "optim/norm_table.h"
#include "zero/agreement/agreement_hashes.h"
#include "zero/agreement/rank_agreement.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

// For the wire: whose numbers a message has.
inline constexpr const char* kExchangeOfSums = "the norm of the gradients";

// What one rank knows.
struct SumsOfRank {
  std::vector<optim::ExactSum> squares_of_group;
  optim::ExactSum weight;
  std::vector<bool> not_finite;      // by parameter
  bool not_finite_anywhere = false;  // in a stage of a pipeline
  AgreementHashes own_hashes;        // to be compared
  double multiplied_by = 1;  // what a script has multiplied the gradients by (gradient_scale.h)
};

SumsOfRank nothing_of(size_t groups, size_t parameters);
// Words as optim/norm_table.h has them, added to what is known.
void add_words(const optim::NormSizes& sizes, const int64_t* words, SumsOfRank& sums);

// Whether squares of slices have sums of their own, behind those of parameters that all ranks have.
bool has_slices(const ParameterPages& pages);

// The ranks that have the squares of all elements between them, each element once.
struct RanksOfSquares {
  size_t first = 0;
  size_t count = 1;
  std::vector<size_t> of_experts;  // where experts are cut over ranks: of all experts
};
RanksOfSquares ranks_of_squares(const ParameterPages& pages);

// The sums of ranks with other samples; those of experts are added to the rest. by_rank: over pages.world().
SumsOfRank over_ranks(const std::vector<SumsOfRank>& by_rank, const RanksOfSquares& squares);

// How far apart sums of squares may be, relative to the larger, whose gradients were computed of the same numbers in
// another order, as by kernels with atomic additions. What is wrong is farther: a part of a gradient for the whole.
double noise_of_whole_gradients(const ParameterPages& pages);
// The sums of ranks that have slices of the same parameters, each over all ranks that have its slices: first the groups of
// whole parameters, then those of slices. Throws on all of them alike where they gave other weights, or where gradients
// of whole parameters differ by more than the noise.
SumsOfRank over_slices(const std::vector<SumsOfRank>& by_rank, double noise);

// The sums of the whole model. Throws where ranks made other numbers of steps, and where the gradients of a pipeline's
// stages were clipped each by its own norm. what: is exchanged, for errors. Collective.
SumsOfRank over_all_ranks(const ParameterPages& pages, RankAgreement& agreement, SumsOfRank own,
                          const char* what = kExchangeOfSums);

}  // namespace zeropage::zero
