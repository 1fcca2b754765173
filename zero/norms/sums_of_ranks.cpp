#include "zero/norms/sums_of_ranks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include <ATen/ATen.h>

#include "base/exact.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

using optim::ExactSum;

// For the wire: all groups, the weight, what is compared, which parameters are not finite.
std::vector<int64_t> row_of(const SumsOfRank& sums) {
  std::vector<int64_t> row;
  const auto append = [&row](const ExactSum& sum) {
    const ExactSum::Words words = sum.words();
    row.insert(row.end(), words.begin(), words.end());
  };
  for (const ExactSum& squares : sums.squares_of_group) append(squares);
  append(sums.weight);
  for (const uint64_t number :
       {sums.own_hashes.steps, sums.own_hashes.settings, sums.own_hashes.values}) {
    row.push_back(static_cast<int64_t>(number));
  }
  row.push_back(std::bit_cast<int64_t>(sums.multiplied_by));
  const size_t flags = row.size();
  constexpr size_t kOfWord = optim::kFlagsPerWord;
  row.resize(flags + base::div_ceil(sums.not_finite.size(), kOfWord));
  for (size_t index = 0; index < sums.not_finite.size(); ++index) {
    if (sums.not_finite[index]) row[flags + index / kOfWord] |= int64_t{1} << index % kOfWord;
  }
  return row;
}

ExactSum sum_at(const int64_t* words) {
  return ExactSum::from_words(std::span<const int64_t, ExactSum::kWords>(words, ExactSum::kWords));
}

SumsOfRank sums_of_row(const int64_t* row, size_t groups, size_t parameters) {
  SumsOfRank sums = nothing_of(groups, parameters);
  for (ExactSum& squares : sums.squares_of_group) {
    squares = sum_at(row);
    row += ExactSum::kWords;
  }
  sums.weight = sum_at(row);
  row += ExactSum::kWords;
  for (uint64_t* const number :
       {&sums.own_hashes.steps, &sums.own_hashes.settings, &sums.own_hashes.values}) {
    *number = static_cast<uint64_t>(*row++);
  }
  sums.multiplied_by = std::bit_cast<double>(*row++);
  constexpr size_t kOfWord = optim::kFlagsPerWord;
  for (size_t index = 0; index < parameters; ++index) {
    sums.not_finite[index] = (row[index / kOfWord] >> index % kOfWord & 1) != 0;
  }
  return sums;
}

// What each rank knows, by rank.
std::vector<SumsOfRank> exchange(const comm::World& world, const SumsOfRank& own,
                                 const char* what) {
  const std::vector<int64_t> row = row_of(own);
  const auto length = static_cast<int64_t>(row.size());
  at::Tensor rows = at::zeros({world.size(), length}, at::kLong);
  std::copy(row.begin(), row.end(), rows[world.rank()].mutable_data_ptr<int64_t>());
  if (world.size() > 1) world.communicator().all_gather(rows.view({-1}), what).wait();
  std::vector<SumsOfRank> by_rank;
  by_rank.reserve(static_cast<size_t>(world.size()));
  for (int rank = 0; rank < world.size(); ++rank) {
    by_rank.push_back(sums_of_row(rows[rank].const_data_ptr<int64_t>(), own.squares_of_group.size(),
                                  own.not_finite.size()));
  }
  return by_rank;
}

void add_flags(const SumsOfRank& of_rank, SumsOfRank& all) {
  for (size_t index = 0; index < all.not_finite.size(); ++index) {
    if (of_rank.not_finite[index]) all.not_finite[index] = true;
  }
}

double rounding_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
      return std::numeric_limits<double>::epsilon();
    case c10::kBFloat16:
      return 1.0 / 128;
    case c10::kHalf:
      return 1.0 / 1024;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

bool any_not_finite(const std::vector<SumsOfRank>& by_rank) {
  return std::any_of(by_rank.begin(), by_rank.end(), [](const SumsOfRank& of_rank) {
    const auto& flags = of_rank.not_finite;
    return std::find(flags.begin(), flags.end(), true) != flags.end();
  });
}

// Ranks with slices compute the same gradient of what is whole.
void check_whole_gradients(const std::vector<SumsOfRank>& by_rank, size_t groups, double noise) {
  if (any_not_finite(by_rank)) return;
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    for (size_t group = 0; group < groups; ++group) {
      const double first = by_rank.front().squares_of_group[group].value();
      const double other = by_rank[rank].squares_of_group[group].value();
      ZP_CHECK(
          std::abs(first - other) <= noise * std::max(first, other),
          "the norm of the gradients: expected the same gradients of whole parameters on all "
          "ranks of a tensor-parallel group, got those of parameter group ",
          group, " with norm ", std::sqrt(first), " on rank 0 and ", std::sqrt(other), " on rank ",
          rank,
          "; give these ranks the same batches and seeds, cut all layers between a column and its "
          "row alike (keys and values as the queries), and name other layers with parameters there "
          "in "
          "the plan, as Cut::between()");
    }
  }
}

// The ranks of `world`, by their places in `all`, of which they are.
std::vector<size_t> places_in(const comm::World& all, const comm::World& world) {
  std::vector<size_t> places;
  for (int rank = 0; rank < world.size(); ++rank) {
    int place = 0;
    while (all.global_rank(place) != world.global_rank(rank)) ++place;
    places.push_back(static_cast<size_t>(place));
  }
  return places;
}

// What stages can tell each other, whose parameters are not the same ones: beside the sums, one flag for
// whether any gradient is not finite.
SumsOfRank without_flags(const SumsOfRank& all) {
  SumsOfRank own_hashes = all;
  const bool any =
      std::find(all.not_finite.begin(), all.not_finite.end(), true) != all.not_finite.end();
  own_hashes.not_finite.assign(1, any);
  return own_hashes;
}

// Each parameter is counted by one stage. In a simulated world nobody else says anything, and the last stage is taken to
// have given weights.
SumsOfRank over_stages(const std::vector<SumsOfRank>& by_stage, const SumsOfRank& own) {
  SumsOfRank all = nothing_of(own.squares_of_group.size(), own.not_finite.size());
  all.not_finite = own.not_finite;
  for (const SumsOfRank& of_stage : by_stage) {
    for (size_t group = 0; group < all.squares_of_group.size(); ++group) {
      all.squares_of_group[group].add(of_stage.squares_of_group[group]);
    }
    all.weight.add(of_stage.weight);
    all.not_finite_anywhere = all.not_finite_anywhere || of_stage.not_finite.front();
  }
  return all;
}

double norm_of_stage(const SumsOfRank& of_stage) {
  double squares = 0;
  for (const ExactSum& of_group : of_stage.squares_of_group) squares += of_group.value();
  return std::sqrt(squares);
}

// A script that clips by this stage's own norm brings that down to its bound, where it is above. So stages are clipped
// that were multiplied by numbers below 1, have one norm now, and are the only ones with as large a norm. Whatever else
// was multiplied is what the script wants.
void check_clipped_together(const ParameterPages& pages, const std::vector<SumsOfRank>& by_stage) {
  constexpr double kNoise = 0.02;
  // A factor is found by what it made of gradients, each of which was rounded.
  const auto& dtype = pages.options().accumulate_dtype;
  const double apart = dtype && is_low_precision(*dtype) ? 1e-2 : 1e-3;
  double bound = 0, least = 1, most = 0;
  for (const SumsOfRank& of_stage : by_stage) {
    const double by = of_stage.multiplied_by;
    least = std::min(least, by);
    most = std::max(most, by);
    if (by < 1) bound = std::max(bound, norm_of_stage(of_stage));
  }
  if (most - least <= apart * most || least <= 0 || most > 1) return;
  // A tied weight's gradient is the sum of two stages' now, and was not when they were clipped.
  const auto& of_model = pages.part()->parameters;
  const bool has_tied = std::any_of(of_model.begin(), of_model.end(),
                                    [](const TensorOfModel& of) { return of.copy_on.has_value(); });
  for (const SumsOfRank& of_stage : by_stage) {
    const double norm = norm_of_stage(of_stage);
    const bool is_at_bound = std::abs(norm - bound) <= kNoise * bound;
    if (has_tied) continue;
    if (of_stage.multiplied_by < 1 ? !is_at_bound : norm > (1 + kNoise) * bound) return;
  }
  std::string words;
  for (size_t rank = 0; rank < by_stage.size(); ++rank) {
    words += c10::str(rank == 0 ? "" : ", ", by_stage[rank].multiplied_by, " on rank ",
                      pages.part()->ranks.global_rank(static_cast<int>(rank)));
  }
  ZP_CHECK(false, "step(): the gradients of a pipeline's stages have been multiplied by ", words,
           " since run(), and a stage cannot clip by the norm of all: expected one factor for all "
           "of them; leave torch::nn::utils::clip_grad_norm_ out, and set "
           "AccumulatorOptions::clip_norm (PipelineOptions::accumulator)");
}

// Throws where ranks made other numbers of steps.
void compare(RankAgreement& agreement, RankAgreement::Axis axis,
             const std::vector<SumsOfRank>& by_rank) {
  AgreementResult agreed_on;
  const AgreementHashes& first = by_rank.front().own_hashes;
  for (const SumsOfRank& of_rank : by_rank) {
    agreed_on.steps = agreed_on.steps && of_rank.own_hashes.steps == first.steps;
    agreed_on.settings = agreed_on.settings && of_rank.own_hashes.settings == first.settings;
    agreed_on.values = agreed_on.values && of_rank.own_hashes.values == first.values;
  }
  agreement.take_result(axis, first, agreed_on, "step()");
}

}  // namespace

void add_words(const optim::NormSizes& sizes, const int64_t* words, SumsOfRank& sums) {
  for (size_t group = 0; group < sums.squares_of_group.size(); ++group) {
    sums.squares_of_group[group].add(sizes.sum(words, static_cast<int64_t>(group)));
  }
  for (size_t index = 0; index < sums.not_finite.size(); ++index) {
    if (sizes.flag(words, static_cast<int64_t>(index))) sums.not_finite[index] = true;
  }
}

SumsOfRank nothing_of(size_t groups, size_t parameters) {
  return {.squares_of_group = std::vector<ExactSum>(groups),
          .weight = {},
          .not_finite = std::vector<bool>(parameters),
          .not_finite_anywhere = false,
          .own_hashes = {},
          .multiplied_by = 1};
}

bool has_slices(const ParameterPages& pages) {
  return pages.tensor_world() != nullptr || pages.worlds().experts;
}

RanksOfSquares ranks_of_squares(const ParameterPages& pages) {
  const PageWorlds& worlds = pages.worlds();
  RanksOfSquares ranks;
  if (pages.plan().ownership() == Ownership::kWholePage) {
    // Who owns whole pages has the whole sum.
    ranks.first = static_cast<size_t>(worlds.all.rank());
    if (worlds.experts) ranks.of_experts = places_in(worlds.all, *worlds.experts);
  } else {
    ranks.first = static_cast<size_t>(worlds.first_rank());
    ranks.count = static_cast<size_t>(worlds.shards.size());
    if (worlds.experts) ranks.of_experts = places_in(worlds.all, worlds.all);
  }
  return ranks;
}

SumsOfRank over_ranks(const std::vector<SumsOfRank>& by_rank, const RanksOfSquares& squares) {
  const SumsOfRank& first = by_rank[squares.first];
  SumsOfRank all = nothing_of(first.squares_of_group.size(), first.not_finite.size());
  for (size_t rank = squares.first; rank < squares.first + squares.count; ++rank) {
    for (size_t group = 0; group < all.squares_of_group.size(); ++group) {
      all.squares_of_group[group].add(by_rank[rank].squares_of_group[group]);
    }
  }
  for (const SumsOfRank& of_rank : by_rank) {
    all.weight.add(of_rank.weight);
    add_flags(of_rank, all);
    // A rank that owns little may have nothing to tell it by.
    if (all.multiplied_by == 1) all.multiplied_by = of_rank.multiplied_by;
  }
  if (squares.of_experts.empty()) return all;
  const size_t groups = all.squares_of_group.size() / 2;
  all.squares_of_group.resize(groups);
  for (const size_t rank : squares.of_experts) {
    for (size_t group = 0; group < groups; ++group) {
      all.squares_of_group[group].add(by_rank[rank].squares_of_group[groups + group]);
    }
  }
  return all;
}

double noise_of_whole_gradients(const ParameterPages& pages) {
  double rounding = 0;
  for (const PlacedParameter& placed : pages.parameters()) {
    const PageLayout& page = pages.layouts()[placed.page];
    if (!placed.parameter.slice && page.requires_grad) {
      rounding = std::max(rounding, rounding_of(page.dtype));
    }
  }
  return 16 * rounding;
}

SumsOfRank over_slices(const std::vector<SumsOfRank>& by_rank, double noise) {
  SumsOfRank all = by_rank.front();
  const size_t groups = all.squares_of_group.size() / 2;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    ZP_CHECK(by_rank[rank].weight.words() == all.weight.words(),
             "accumulator.backward(): expected the same weights on all ranks of a tensor-parallel "
             "group, which compute the same samples, got ",
             all.weight.value(), " on rank 0 and ", by_rank[rank].weight.value(), " on rank ", rank,
             "; give them the same batches and weights");
    for (size_t group = 0; group < groups; ++group) {
      all.squares_of_group[group].add(by_rank[rank].squares_of_group[groups + group]);
    }
    add_flags(by_rank[rank], all);
  }
  // Other weights say more.
  check_whole_gradients(by_rank, groups, noise);
  all.squares_of_group.resize(groups);
  return all;
}

SumsOfRank over_all_ranks(const ParameterPages& pages, RankAgreement& agreement, SumsOfRank own,
                          const char* what) {
  using Axis = RankAgreement::Axis;
  // Values are compared by the backwards.
  own.own_hashes = agreement.own_hashes(Axis::kPipeline);
  const comm::World* const group = pages.tensor_world();
  const std::vector<SumsOfRank> by_rank = exchange(pages.world(), own, what);
  compare(agreement, Axis::kData, by_rank);
  SumsOfRank all = over_ranks(by_rank, ranks_of_squares(pages));
  all.own_hashes = own.own_hashes;
  if (group != nullptr) {
    std::vector<SumsOfRank> by_slice = exchange(*group, all, what);
    // In a simulated world no other rank says anything; each would say the same.
    if (group->device().is_meta()) by_slice.assign(by_slice.size(), all);
    compare(agreement, Axis::kTensor, by_slice);
    all = over_slices(by_slice, noise_of_whole_gradients(pages));
  }
  const comm::World* const stages = pipeline_world_of(pages);
  if (stages == nullptr) return all;
  all.own_hashes = own.own_hashes;
  const std::vector<SumsOfRank> by_stage = exchange(*stages, without_flags(all), what);
  compare(agreement, Axis::kPipeline, by_stage);
  check_clipped_together(pages, by_stage);
  SumsOfRank of_model = over_stages(by_stage, all);
  if (stages->device().is_meta() && of_model.weight.value() == 0) of_model.weight.add(1);
  return of_model;
}

}  // namespace zeropage::zero
