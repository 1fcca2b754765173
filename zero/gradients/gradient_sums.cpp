#include "zero/gradients/gradient_sums.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "device/named_range.h"
#include "device/page_locked.h"
#include "device/stream.h"
#include "memory/check.h"
#include "memory/exact.h"

namespace zeropage {
namespace {

using offload::ExactSum;
using offload::NormSizes;

constexpr const char* kExchange = "the norm of the gradients";

// What one rank knows.
struct SumsOfRank {
  std::vector<ExactSum> squares_of_group;
  ExactSum weight;
  std::vector<bool> not_finite;      // by parameter
  bool not_finite_anywhere = false;  // in a stage of a pipeline
  Told told;                         // to be compared
};

// Words as offload/norm_table.h has them, added to what is known.
void add_words(const NormSizes& sizes, const int64_t* words, SumsOfRank& sums) {
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
          .told = {}};
}

// For the wire: all groups, the weight, what is compared, which parameters are not finite.
std::vector<int64_t> row_of(const SumsOfRank& sums) {
  std::vector<int64_t> row;
  const auto append = [&row](const ExactSum& sum) {
    const ExactSum::Words words = sum.words();
    row.insert(row.end(), words.begin(), words.end());
  };
  for (const ExactSum& squares : sums.squares_of_group) append(squares);
  append(sums.weight);
  for (const uint64_t number : {sums.told.steps, sums.told.settings, sums.told.values}) {
    row.push_back(static_cast<int64_t>(number));
  }
  const size_t flags = row.size();
  constexpr size_t kOfWord = offload::kFlagsPerWord;
  row.resize(flags + memory::div_ceil(sums.not_finite.size(), kOfWord));
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
  for (uint64_t* const number : {&sums.told.steps, &sums.told.settings, &sums.told.values}) {
    *number = static_cast<uint64_t>(*row++);
  }
  constexpr size_t kOfWord = offload::kFlagsPerWord;
  for (size_t index = 0; index < parameters; ++index) {
    sums.not_finite[index] = (row[index / kOfWord] >> index % kOfWord & 1) != 0;
  }
  return sums;
}

// What each rank knows, by rank.
std::vector<SumsOfRank> exchange(const comm::World& world, const SumsOfRank& own) {
  const std::vector<int64_t> row = row_of(own);
  const auto length = static_cast<int64_t>(row.size());
  at::Tensor rows = at::zeros({world.size(), length}, at::kLong);
  std::copy(row.begin(), row.end(), rows[world.rank()].mutable_data_ptr<int64_t>());
  if (world.size() > 1) world.communicator().all_gather(rows.view({-1}), kExchange).wait();
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

// The ranks that have the squares of all elements between them, each element once.
struct RanksOfSquares {
  size_t first = 0;
  size_t count = 1;
};

RanksOfSquares ranks_of_squares(const ParameterPages& pages) {
  // Who owns whole pages has the whole sum.
  if (pages.plan().ownership() == Ownership::kWholePage) {
    return {.first = static_cast<size_t>(pages.world().rank())};
  }
  return {.first = static_cast<size_t>(pages.worlds().first_rank()),
          .count = static_cast<size_t>(pages.shards().size())};
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
  }
  return all;
}

// Of ranks that have slices of the same parameters, each over all ranks that have its slices.
SumsOfRank over_slices(const std::vector<SumsOfRank>& by_rank) {
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
  all.squares_of_group.resize(groups);
  return all;
}

// What stages can tell each other, whose parameters are not the same ones: beside the sums, one flag for
// whether any gradient is not finite.
SumsOfRank without_flags(const SumsOfRank& all) {
  SumsOfRank told = all;
  const bool any =
      std::find(all.not_finite.begin(), all.not_finite.end(), true) != all.not_finite.end();
  told.not_finite.assign(1, any);
  return told;
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

// Throws where ranks made other numbers of steps.
void compare(RankAgreement& agreement, RankAgreement::Axis axis,
             const std::vector<SumsOfRank>& by_rank) {
  HeardAlike heard;
  const Told& first = by_rank.front().told;
  for (const SumsOfRank& of_rank : by_rank) {
    heard.steps = heard.steps && of_rank.told.steps == first.steps;
    heard.settings = heard.settings && of_rank.told.settings == first.settings;
    heard.values = heard.values && of_rank.told.values == first.values;
  }
  agreement.hear(axis, first, heard, "step()");
}

SumsOfRank over_all_ranks(const ParameterPages& pages, RankAgreement& agreement, SumsOfRank own) {
  using Axis = RankAgreement::Axis;
  own.told = agreement.told();
  const comm::World* const group = pages.tensor_world();
  const std::vector<SumsOfRank> by_rank = exchange(pages.world(), own);
  compare(agreement, Axis::kData, by_rank);
  SumsOfRank all = over_ranks(by_rank, ranks_of_squares(pages));
  all.told = own.told;
  if (group != nullptr) {
    std::vector<SumsOfRank> by_slice = exchange(*group, all);
    // In a simulated world no other rank says anything; each would say the same.
    if (group->device().is_meta()) by_slice.assign(by_slice.size(), all);
    compare(agreement, Axis::kTensor, by_slice);
    all = over_slices(by_slice);
  }
  const comm::World* const stages = pipeline_world_of(pages);
  if (stages == nullptr) return all;
  all.told = own.told;
  const std::vector<SumsOfRank> by_stage = exchange(*stages, without_flags(all));
  compare(agreement, Axis::kPipeline, by_stage);
  SumsOfRank of_model = over_stages(by_stage, all);
  if (stages->device().is_meta() && of_model.weight.value() == 0) of_model.weight.add(1);
  return of_model;
}

GradientSums told(SumsOfRank&& all) {
  GradientSums sums{.squares_of_group = std::move(all.squares_of_group),
                    .not_finite = {},
                    .weight = all.weight,
                    .all_finite = !all.not_finite_anywhere};
  for (size_t index = 0; index < all.not_finite.size(); ++index) {
    if (all.not_finite[index]) sums.not_finite.push_back(index);
  }
  sums.all_finite = sums.all_finite && sums.not_finite.empty();
  return sums;
}

}  // namespace

GradientSummer::GradientSummer(std::shared_ptr<ParameterPages> pages,
                               std::shared_ptr<StepGradients> gradients,
                               std::shared_ptr<RankAgreement> agreement)
    : pages_(std::move(pages)),
      gradients_(std::move(gradients)),
      agreement_(std::move(agreement)) {}

std::vector<int> GradientSummer::slices_apart(std::vector<int> group_of, size_t groups) const {
  if (pages_->tensor_world() == nullptr) return group_of;
  for (size_t index = 0; index < group_of.size(); ++index) {
    const bool is_slice = pages_->parameters()[index].parameter.slice.has_value();
    if (is_slice && group_of[index] >= 0) group_of[index] += static_cast<int>(groups);
  }
  return group_of;
}

// Blocks are counted from where the page begins; the first one may begin before the parameter.
std::vector<offload::NormPart> GradientSummer::parts_of_page(
    size_t page, const std::vector<int>& group_of) const {
  const Range owned = pages_->owned(page);
  std::vector<offload::NormPart> parts;
  for (const size_t index : pages_->parameters().of_page(page)) {
    if (group_of[index] < 0) continue;
    const PlacedParameter& placed = pages_->parameters()[index];
    const Range range = intersection(owned, placed.range);
    const int64_t cut = std::min(range.end, memory::round_up(range.begin, kShardBlockNumel));
    for (const Range& part : {Range{range.begin, cut}, Range{cut, range.end}}) {
      if (part.empty()) continue;
      parts.push_back({.begin = part.begin - owned.begin,
                       .numel = part.numel(),
                       .sum = group_of[index],
                       .flag = static_cast<int64_t>(index)});
    }
  }
  return parts;
}

void GradientSummer::make_tables(const std::vector<int>& group_of, size_t groups) {
  std::vector<int> with_gradient = slices_apart(group_of, groups);
  for (size_t index = 0; index < with_gradient.size(); ++index) {
    const bool counts = !pages_->parameters()[index].parameter.counts_elsewhere;
    if (!gradients_->has(index) || !counts) with_gradient[index] = -1;
  }
  const NormSizes sizes{.sums = static_cast<int64_t>(sums_of(groups)),
                        .flags = static_cast<int64_t>(with_gradient.size())};
  if (tables_.group_of == with_gradient && tables_.sizes.sums == sizes.sums) return;
  tables_ = {.group_of = std::move(with_gradient), .sizes = sizes, .of_pages = {}};
  for (size_t page = 0; page < pages_->layouts().size(); ++page) {
    if (!pages_->layouts()[page].requires_grad) continue;
    auto parts = parts_of_page(page, tables_.group_of);
    if (parts.empty()) continue;
    tables_.of_pages.push_back({page, {std::move(parts), sizes, gradients_->owned(page).device()}});
  }
}

std::vector<int> GradientSummer::one_group() const {
  return slices_apart(std::vector<int>(pages_->parameters().size(), 0), 1);
}

std::function<void(const at::Tensor& gradient)> GradientSummer::note_passing(size_t page) {
  Passed& passed = passed_[page];
  if (passed.table == nullptr) {
    const std::vector<int> group_of = one_group();
    passed.table = std::make_shared<const offload::NormTable>(
        parts_of_page(page, group_of),
        NormSizes{.sums = static_cast<int64_t>(sums_of(1)),
                  .flags = static_cast<int64_t>(group_of.size())},
        c10::kCPU);
  }
  const auto told = std::make_shared<std::promise<at::Tensor>>();
  passed.words = told->get_future().share();
  return [told, table = passed.table](const at::Tensor& gradient) {
    const at::Tensor words = table->sizes().make_words(c10::kCPU);
    if (!table->empty()) table->add_squares(gradient, words);
    told->set_value(words);
  };
}

// What is kept of gradients that are gone is of all parameters together.
void GradientSummer::check_one_group(const std::vector<int>& group_of) const {
  const bool is_one =
      std::all_of(group_of.begin(), group_of.end(), [](int group) { return group == 0; });
  ZP_CHECK(is_one,
           "norms of gradients by group: backward has updated their pages and freed them "
           "(options.offload.step is StepWhen::kInBackward); use StepWhen::kInStep");
}

void GradientSummer::add_own(const at::Tensor& words) const {
  // Before any is read: those that are there yet may go meanwhile.
  for (const OfPage& of_page : tables_.of_pages) {
    ZP_CHECK(
        passed_.contains(of_page.page) ||
            gradients_->owned(of_page.page).storage().data() != nullptr,
        "norms of gradients after backward, which has made the step with them already and freed "
        "that of page \"",
        pages_->layouts()[of_page.page].name,
        "\" (options.offload.step is StepWhen::kInBackward); use an Accumulator, which reports "
        "their norm, or StepWhen::kInStep");
  }
  for (const OfPage& of_page : tables_.of_pages) {
    if (const auto passed = passed_.find(of_page.page); passed != passed_.end()) {
      if (!words.is_cpu()) continue;
      try {
        words.add_(passed->second.words.get());
      } catch (const std::future_error&) {
        // The page's update failed before it came to that. The step says why.
      }
      continue;
    }
    const at::Tensor gradient = gradients_->owned(of_page.page);
    if (gradient.device() == words.device()) of_page.table.add_squares(gradient, words);
  }
}

bool GradientSummer::any_on_device() const {
  return std::any_of(tables_.of_pages.begin(), tables_.of_pages.end(), [&](const OfPage& of_page) {
    return !gradients_->owned(of_page.page).is_cpu();
  });
}

GradientSums GradientSummer::sum(const std::vector<int>& group_of, size_t groups,
                                 const ExactSum& weight) {
  const memory::NamedRange range("GradientSummer::sum");
  const c10::Device device = pages_->world().communicator().device();
  SumsOfRank own = nothing_of(sums_of(groups), group_of.size());
  own.weight = weight;
  // Without values there is nothing to add.
  if (!device.is_meta()) {
    if (!passed_.empty()) check_one_group(group_of);
    make_tables(group_of, groups);
    memory::ArrivingCopy of_device;
    if (any_on_device()) {
      const at::Tensor words = tables_.sizes.make_words(device);
      add_own(words);
      of_device = memory::start_copy_to_host(words);
    }
    const at::Tensor of_host = tables_.sizes.make_words(c10::kCPU);
    add_own(of_host);
    add_words(tables_.sizes, of_host.const_data_ptr<int64_t>(), own);
    of_device.arrived.synchronize();
    if (of_device.values.defined()) {
      add_words(tables_.sizes, of_device.values.const_data_ptr<int64_t>(), own);
    }
  }
  return told(over_all_ranks(*pages_, *agreement_, std::move(own)));
}

ExactSum GradientSummer::sum_weight(const ExactSum& weight) const {
  SumsOfRank own;
  own.weight = weight;
  return over_all_ranks(*pages_, *agreement_, std::move(own)).weight;
}

bool GradientSummer::can_start() const {
  // Stages tell each other by their hosts.
  if (pipeline_world_of(*pages_) != nullptr) return false;
  const c10::Device device = pages_->world().communicator().device();
  if (!memory::has_streams(device.type())) return false;
  for (size_t page = 0; page < pages_->layouts().size(); ++page) {
    if (!pages_->layouts()[page].requires_grad) continue;
    const at::Tensor gradient = gradients_->owned(page);
    if (gradient.defined() && gradient.device() != device) return false;
  }
  return true;
}

GradientSummer::Started GradientSummer::start(const std::vector<int>& group_of, size_t groups) {
  const memory::NamedRange range("GradientSummer::start");
  const comm::World& world = pages_->world();
  const c10::Device device = world.communicator().device();
  make_tables(group_of, groups);
  const NormSizes sizes = tables_.sizes;
  const int64_t words = sizes.words();
  const comm::World* const group = pages_->tensor_world();
  const int64_t slices = group != nullptr ? group->size() : 1;
  const int64_t own_slice = group != nullptr ? group->rank() : 0;
  // By slice, then by rank that has it.
  const at::Tensor rows =
      at::zeros({slices * world.size() * words}, at::TensorOptions(device).dtype(at::kLong));
  const at::Tensor of_slice =
      rows.narrow(0, own_slice * world.size() * words, world.size() * words);
  add_own(of_slice.narrow(0, world.rank() * words, words));
  if (world.size() > 1) world.communicator().all_gather(of_slice, kExchange).wait();
  if (group != nullptr) group->communicator().all_gather(rows, kExchange).wait();
  const at::Tensor flags =
      rows.view({-1, words}).narrow(1, words - sizes.flag_words(), sizes.flag_words());
  Started started{.found_inf = flags.ne(0).any().to(at::kFloat).view({1}), .arrived = {}};
  const memory::ArrivingCopy copy = memory::start_copy_to_host(rows);
  started.arrived = [copy, sizes, slices, is_sliced = group != nullptr, ranks = world.size(),
                     squares = ranks_of_squares(*pages_)] {
    copy.arrived.synchronize();
    const int64_t* row = copy.values.const_data_ptr<int64_t>();
    std::vector<SumsOfRank> by_slice;
    for (int64_t slice = 0; slice < slices; ++slice) {
      std::vector<SumsOfRank> by_rank;
      for (int other = 0; other < ranks; ++other, row += sizes.words()) {
        by_rank.push_back(
            nothing_of(static_cast<size_t>(sizes.sums), static_cast<size_t>(sizes.flags)));
        add_words(sizes, row, by_rank.back());
      }
      by_slice.push_back(over_ranks(by_rank, squares));
    }
    return told(is_sliced ? over_slices(by_slice) : std::move(by_slice.front()));
  };
  return started;
}

}  // namespace zeropage
