#include "zero/gradients/gradient_sums.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "device/named_range.h"
#include "device/stream.h"
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
  std::vector<bool> not_finite;  // by parameter
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
          .not_finite = std::vector<bool>(parameters)};
}

// For the wire: all groups, the weight, which parameters are not finite.
std::vector<int64_t> row_of(const SumsOfRank& sums) {
  std::vector<int64_t> row;
  const auto append = [&row](const ExactSum& sum) {
    const ExactSum::Words words = sum.words();
    row.insert(row.end(), words.begin(), words.end());
  };
  for (const ExactSum& squares : sums.squares_of_group) append(squares);
  append(sums.weight);
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
  constexpr size_t kOfWord = offload::kFlagsPerWord;
  for (size_t index = 0; index < parameters; ++index) {
    sums.not_finite[index] = (row[index / kOfWord] >> index % kOfWord & 1) != 0;
  }
  return sums;
}

// The rows of all ranks: [ranks, row].
at::Tensor gather_rows(const comm::World& world, const std::vector<int64_t>& row) {
  const auto length = static_cast<int64_t>(row.size());
  at::Tensor rows = at::zeros({world.size(), length}, at::kLong);
  std::copy(row.begin(), row.end(), rows[world.rank()].mutable_data_ptr<int64_t>());
  if (world.size() > 1) world.communicator().all_gather(rows.view({-1}), kExchange).wait();
  return rows;
}

// Where ranks own whole pages, each has the whole sum.
GradientSums over_ranks(const std::vector<SumsOfRank>& by_rank, size_t rank, Ownership ownership) {
  const SumsOfRank& own = by_rank[rank];
  const bool whole = ownership == Ownership::kWholePage;
  GradientSums all{.squares_of_group = whole ? own.squares_of_group
                                             : std::vector<ExactSum>(own.squares_of_group.size()),
                   .not_finite = {},
                   .weight = {}};
  for (const SumsOfRank& of_rank : by_rank) {
    for (size_t group = 0; group < all.squares_of_group.size() && !whole; ++group) {
      all.squares_of_group[group].add(of_rank.squares_of_group[group]);
    }
    all.weight.add(of_rank.weight);
  }
  for (size_t index = 0; index < own.not_finite.size(); ++index) {
    const auto has_it = [index](const SumsOfRank& of_rank) { return of_rank.not_finite[index]; };
    if (std::any_of(by_rank.begin(), by_rank.end(), has_it)) all.not_finite.push_back(index);
  }
  return all;
}

// A copy in page-locked memory, and when it is there.
struct OnItsWay {
  at::Tensor words;
  memory::Event arrival;
};

OnItsWay start_copy(const at::Tensor& from) {
  const at::Tensor to =
      at::empty(from.sizes(), at::TensorOptions().dtype(from.dtype()).pinned_memory(true));
  to.copy_(from, /*non_blocking=*/true);
  return {to, memory::Stream::current(from.device()).record()};
}

}  // namespace

GradientSummer::GradientSummer(std::shared_ptr<ParameterPages> pages,
                               std::shared_ptr<StepGradients> gradients)
    : pages_(std::move(pages)), gradients_(std::move(gradients)) {}

// Blocks are counted from where the page begins; the first one may begin before the parameter.
std::vector<offload::NormPart> GradientSummer::parts_of_page(
    size_t page, const std::vector<int>& group_of) const {
  const Range owned = pages_->owned(page);
  std::vector<offload::NormPart> parts;
  for (size_t index = 0; index < group_of.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (group_of[index] < 0 || placed.page != page) continue;
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
  std::vector<int> with_gradient = group_of;
  for (size_t index = 0; index < with_gradient.size(); ++index) {
    if (!gradients_->has(index)) with_gradient[index] = -1;
  }
  const NormSizes sizes{.sums = static_cast<int64_t>(groups),
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

void GradientSummer::add_own(const at::Tensor& words) const {
  for (const OfPage& of_page : tables_.of_pages) {
    const at::Tensor& gradient = gradients_->owned(of_page.page);
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
  const comm::World& world = pages_->world();
  const c10::Device device = world.communicator().device();
  SumsOfRank own = nothing_of(groups, group_of.size());
  own.weight = weight;
  // Without values there is nothing to add.
  if (!device.is_meta()) {
    make_tables(group_of, groups);
    OnItsWay of_device;
    if (any_on_device()) {
      const at::Tensor words = tables_.sizes.make_words(device);
      add_own(words);
      of_device = start_copy(words);
    }
    const at::Tensor of_host = tables_.sizes.make_words(c10::kCPU);
    add_own(of_host);
    add_words(tables_.sizes, of_host.const_data_ptr<int64_t>(), own);
    of_device.arrival.synchronize();
    if (of_device.words.defined()) {
      add_words(tables_.sizes, of_device.words.const_data_ptr<int64_t>(), own);
    }
  }
  const at::Tensor rows = gather_rows(world, row_of(own));
  std::vector<SumsOfRank> by_rank;
  for (int rank = 0; rank < world.size(); ++rank) {
    by_rank.push_back(sums_of_row(rows[rank].const_data_ptr<int64_t>(), groups, group_of.size()));
  }
  return over_ranks(by_rank, static_cast<size_t>(world.rank()), pages_->plan().ownership());
}

bool GradientSummer::can_start() const {
  const c10::Device device = pages_->world().communicator().device();
  if (!memory::has_streams(device.type())) return false;
  for (size_t page = 0; page < pages_->layouts().size(); ++page) {
    if (!pages_->layouts()[page].requires_grad) continue;
    if (gradients_->owned(page).device() != device) return false;
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
  const at::Tensor rows =
      at::zeros({world.size() * words}, at::TensorOptions(device).dtype(at::kLong));
  add_own(rows.narrow(0, world.rank() * words, words));
  if (world.size() > 1) world.communicator().all_gather(rows, kExchange).wait();
  const at::Tensor flags =
      rows.view({world.size(), words}).narrow(1, words - sizes.flag_words(), sizes.flag_words());
  Started started{.found_inf = flags.ne(0).any().to(at::kFloat).view({1}), .arrived = {}};
  const OnItsWay copy = start_copy(rows);
  started.arrived = [copy, sizes, rank = static_cast<size_t>(world.rank()),
                     ranks = static_cast<size_t>(world.size()),
                     ownership = pages_->plan().ownership()] {
    copy.arrival.synchronize();
    std::vector<SumsOfRank> by_rank;
    for (size_t other = 0; other < ranks; ++other) {
      by_rank.push_back(
          nothing_of(static_cast<size_t>(sizes.sums), static_cast<size_t>(sizes.flags)));
      add_words(sizes,
                copy.words.const_data_ptr<int64_t>() + static_cast<int64_t>(other) * sizes.words(),
                by_rank.back());
    }
    return over_ranks(by_rank, rank, ownership);
  };
  return started;
}

ExactSum sum_over_ranks(const comm::World& world, const ExactSum& own) {
  const ExactSum::Words words = own.words();
  const at::Tensor rows = gather_rows(world, {words.begin(), words.end()});
  ExactSum all;
  for (int rank = 0; rank < world.size(); ++rank) {
    all.add(sum_at(rows[rank].const_data_ptr<int64_t>()));
  }
  return all;
}

}  // namespace zeropage
