#include "zero/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include "device/named_range.h"
#include "memory/check.h"
#include "memory/exact.h"
#include "offload/flat_norm.h"
#include "zero/setup/choose_gradients.h"

namespace zeropage {
namespace {

using offload::ExactSum;

// Parameters whose flags share a word on the wire.
constexpr size_t kFlagsPerWord = 32;

constexpr auto kWords = static_cast<int64_t>(ExactSum::kWords);

// The sums of squares of the blocks of one parameter that this rank owns.
struct Blocks {
  size_t parameter;
  at::Tensor sums;  // fp64 [blocks]
};

// Blocks are counted from where the page begins; the first one may begin before the parameter.
void add_blocks_of(const ParameterPages& pages, const at::Tensor& owned_gradient, size_t parameter,
                   std::vector<Blocks>& blocks) {
  const PlacedParameter& placed = pages.parameters()[parameter];
  const Range owned = pages.owned(placed.page);
  const Range range = intersection(owned, placed.range);
  const int64_t cut = std::min(range.end, memory::round_up(range.begin, kShardBlockNumel));
  for (const Range& part : {Range{range.begin, cut}, Range{cut, range.end}}) {
    if (part.empty()) continue;
    blocks.push_back({parameter, offload::block_sums_of_squares(owned_gradient.narrow(
                                     0, part.begin - owned.begin, part.numel()))});
  }
}

// The blocks' sums on the host, with one copy from a device. Of offloaded gradients they are there.
std::vector<at::Tensor> on_host(const std::vector<Blocks>& blocks) {
  std::vector<at::Tensor> sums;
  std::vector<at::Tensor> of_device;
  std::vector<int64_t> sizes;
  for (const Blocks& of_part : blocks) {
    sums.push_back(of_part.sums);
    if (of_part.sums.is_cpu()) continue;
    of_device.push_back(of_part.sums);
    sizes.push_back(of_part.sums.numel());
  }
  if (of_device.empty()) return sums;
  const std::vector<at::Tensor> copies = at::cat(of_device).cpu().split_with_sizes(sizes);
  auto next = copies.begin();
  for (at::Tensor& of_part : sums) {
    if (!of_part.is_cpu()) of_part = *next++;
  }
  return sums;
}

// What this rank knows: all groups, the weight, which parameters are not finite.
std::vector<int64_t> row_of(const GradientSums& sums, size_t parameters) {
  std::vector<int64_t> row;
  const auto append = [&row](const ExactSum& sum) {
    const ExactSum::Words words = sum.words();
    row.insert(row.end(), words.begin(), words.end());
  };
  for (const ExactSum& squares : sums.squares_of_group) append(squares);
  append(sums.weight);
  const size_t flags = row.size();
  row.resize(flags + memory::div_ceil(parameters, kFlagsPerWord));
  for (const size_t index : sums.not_finite) {
    row[flags + index / kFlagsPerWord] |= int64_t{1} << index % kFlagsPerWord;
  }
  return row;
}

// The rows of all ranks: [ranks, row].
at::Tensor gather_rows(const comm::World& world, const std::vector<int64_t>& row) {
  const auto length = static_cast<int64_t>(row.size());
  at::Tensor rows = at::zeros({world.size(), length}, at::kLong);
  std::copy(row.begin(), row.end(), rows[world.rank()].mutable_data_ptr<int64_t>());
  if (world.size() > 1) {
    world.communicator().all_gather(rows.view({-1}), "the norm of the gradients").wait();
  }
  return rows;
}

ExactSum sum_at(const int64_t* words) {
  return ExactSum::from_words(std::span<const int64_t, ExactSum::kWords>(words, ExactSum::kWords));
}

GradientSums sum_of_own(const ShardedParameters& sharded, const std::vector<int>& group_of,
                        size_t groups) {
  const ParameterPages& pages = *sharded.pages;
  GradientSums own{.squares_of_group = std::vector<ExactSum>(groups)};
  // Without values there is nothing to add.
  if (pages.world().communicator().device().is_meta()) return own;
  std::vector<Blocks> blocks;
  for (size_t index = 0; index < pages.parameters().size(); ++index) {
    if (group_of[index] < 0 || !sharded.reducer->has_gradient(index)) continue;
    const size_t page = pages.parameters()[index].page;
    add_blocks_of(pages, sharded.reducer->owned_gradient(page), index, blocks);
  }
  const std::vector<at::Tensor> sums = on_host(blocks);
  for (size_t part = 0; part < sums.size(); ++part) {
    const std::span<const double> terms(sums[part].const_data_ptr<double>(),
                                        static_cast<size_t>(sums[part].numel()));
    const size_t parameter = blocks[part].parameter;
    own.squares_of_group[static_cast<size_t>(group_of[parameter])].add(terms);
    if (!std::all_of(terms.begin(), terms.end(), [](double term) { return std::isfinite(term); })) {
      own.not_finite.push_back(parameter);
    }
  }
  return own;
}

double norm_of(const ExactSum& squares) {
  return std::sqrt(squares.value());
}

GradientNorm norm_in_groups(const DataParallelBase& model, const std::vector<int>& group_of,
                            size_t groups) {
  const ShardedParameters& sharded = model.sharded_parameters();
  sharded.reducer->finish();
  const GradientSums sums = sum_gradients(sharded, group_of, groups);
  GradientNorm norm;
  ExactSum total;
  for (const ExactSum& squares : sums.squares_of_group) {
    total.add(squares);
    norm.of_group.push_back(norm_of(squares));
  }
  norm.total = norm_of(total);
  norm.not_finite = names_of(*sharded.pages, sums.not_finite);
  return norm;
}

}  // namespace

GradientSums sum_gradients(const ShardedParameters& sharded, const std::vector<int>& group_of,
                           size_t groups, const ExactSum& weight) {
  const memory::NamedRange range("sum_gradients");
  const comm::World& world = sharded.pages->world();
  GradientSums own = sum_of_own(sharded, group_of, groups);
  own.weight = weight;
  const size_t parameters = sharded.pages->parameters().size();
  const at::Tensor rows = gather_rows(world, row_of(own, parameters));
  // Where ranks own whole pages, each has the whole sum.
  const bool whole = ownership_of(sharded.options.stage) == Ownership::kWholePage;
  GradientSums all{.squares_of_group =
                       whole ? own.squares_of_group : std::vector<ExactSum>(groups)};
  std::vector<bool> not_finite(parameters);
  for (int rank = 0; rank < world.size(); ++rank) {
    const int64_t* words = rows[rank].const_data_ptr<int64_t>();
    for (ExactSum& squares : all.squares_of_group) {
      if (!whole) squares.add(sum_at(words));
      words += kWords;
    }
    all.weight.add(sum_at(words));
    words += kWords;
    for (size_t index = 0; index < parameters; ++index) {
      if ((words[index / kFlagsPerWord] >> index % kFlagsPerWord & 1) != 0)
        not_finite[index] = true;
    }
  }
  for (size_t index = 0; index < parameters; ++index) {
    if (not_finite[index]) all.not_finite.push_back(index);
  }
  return all;
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

GradientNorm gradient_norm(const DataParallelBase& model) {
  const size_t parameters = model.sharded_parameters().pages->parameters().size();
  GradientNorm norm = norm_in_groups(model, std::vector<int>(parameters, 0), 1);
  norm.of_group.clear();
  return norm;
}

GradientNorm gradient_norm(const DataParallelBase& model,
                           const torch::optim::Optimizer& optimizer) {
  const ParameterPages& pages = *model.sharded_parameters().pages;
  const auto& groups = optimizer.param_groups();
  std::vector<int> group_of(pages.parameters().size(), -1);
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& tensor : groups[group].params()) {
      const int64_t index = pages.index_of(tensor);
      ZP_CHECK(index >= 0, "gradient_norm: a parameter of group ", group, " (sizes ",
               tensor.sizes(),
               ") is not a parameter of the wrapped module; expected an optimizer "
               "of this model");
      group_of[static_cast<size_t>(index)] = static_cast<int>(group);
    }
  }
  return norm_in_groups(model, group_of, groups.size());
}

std::vector<std::string> names_of(const ParameterPages& pages,
                                  const std::vector<size_t>& parameters) {
  std::vector<std::string> names;
  for (const size_t index : parameters) names.push_back(pages.parameters()[index].parameter.name());
  return names;
}

std::string say_not_finite(const std::vector<std::string>& names) {
  constexpr size_t kMost = 3;
  const bool several = names.size() > 1;
  std::string text = several ? "the gradients of parameters " : "the gradient of parameter ";
  for (size_t index = 0; index < std::min(names.size(), kMost); ++index) {
    text += (index > 0 ? ", \"" : "\"") + names[index] + "\"";
  }
  if (names.size() > kMost) text += c10::str(" and ", names.size() - kMost, " more");
  return text + (several ? " are not finite" : " is not finite");
}

double clip_factor(double norm, double max_norm) {
  // The torch function's guard against a norm of zero.
  constexpr double kLeast = 1e-6;
  return std::min(1.0, max_norm / (norm + kLeast));
}

ClippedNorm clip_grad_norm_(const DataParallelBase& model, double max_norm, NotFinite not_finite) {
  ZP_CHECK(max_norm > 0, "clip_grad_norm_: expected a max_norm above 0, got ", max_norm);
  const GradientNorm norm = gradient_norm(model);
  if (!std::isfinite(norm.total)) {
    ZP_CHECK(not_finite == NotFinite::kReturn, "clip_grad_norm_: the norm of the gradients is ",
             norm.total, ": ", say_not_finite(norm.not_finite),
             "; no gradient was changed. Skip this step (zero_grad()), or pass "
             "NotFinite::kReturn and look at the norm");
    return {norm.total, norm.total};
  }
  const double factor = clip_factor(norm.total, max_norm);
  if (factor < 1) {
    model.sharded_parameters().reducer->change_owned(
        [factor](const at::Tensor& owned) { owned.mul_(factor); });
  }
  return {norm.total, norm.total * factor};
}

void clip_grad_value_(const DataParallelBase& model, double clip_value) {
  ZP_CHECK(clip_value > 0, "clip_grad_value_: expected a value above 0, got ", clip_value);
  GradientReducer& reducer = *model.sharded_parameters().reducer;
  reducer.finish();
  reducer.change_owned(
      [clip_value](const at::Tensor& owned) { owned.clamp_(-clip_value, clip_value); });
}

}  // namespace zeropage
