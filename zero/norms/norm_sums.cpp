#include "zero/norms/norm_sums.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "base/exact.h"
#include "device/named_range.h"
#include "device/page_locked.h"
#include "device/stream.h"
#include "zero/norms/sums_of_ranks.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

using optim::ExactSum;
using optim::NormSizes;

NormSums told(SumsOfRank&& all) {
  NormSums sums{.squares_of_group = std::move(all.squares_of_group),
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

NormSummer::NormSummer(std::shared_ptr<ParameterPages> pages,
                       std::shared_ptr<StepGradients> gradients,
                       std::shared_ptr<RankAgreement> agreement)
    : pages_(std::move(pages)),
      gradients_(std::move(gradients)),
      agreement_(std::move(agreement)),
      scale_(pages_, gradients_) {}

size_t NormSummer::sums_of(size_t groups) const {
  return has_slices(*pages_) ? 2 * groups : groups;
}

std::vector<int> NormSummer::slices_apart(std::vector<int> group_of, size_t groups) const {
  if (!has_slices(*pages_)) return group_of;
  for (size_t index = 0; index < group_of.size(); ++index) {
    const bool is_slice = pages_->parameters()[index].parameter.slice.has_value();
    if (is_slice && group_of[index] >= 0) group_of[index] += static_cast<int>(groups);
  }
  return group_of;
}

// Blocks are counted from where the page begins; the first one may begin before the parameter.
std::vector<optim::NormPart> NormSummer::parts_of_page(size_t page,
                                                       const std::vector<int>& group_of) const {
  const Range owned = pages_->owned(page);
  std::vector<optim::NormPart> parts;
  for (const size_t index : pages_->parameters().of_page(page)) {
    if (group_of[index] < 0) continue;
    const PlacedParameter& placed = pages_->parameters()[index];
    const Range range = intersection(owned, placed.range);
    const int64_t cut = std::min(range.end, base::round_up(range.begin, kShardBlockNumel));
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

void NormSummer::make_tables(const std::vector<int>& group_of, size_t groups) {
  std::vector<int> with_gradient = slices_apart(group_of, groups);
  // A page has none where a script has replaced all its gradients, until they are taken over.
  std::vector<bool> is_there;
  for (size_t page = 0; page < pages_->layouts().size(); ++page) {
    is_there.push_back(pages_->layouts()[page].requires_grad && gradients_->owned(page).defined());
  }
  for (size_t index = 0; index < with_gradient.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    const bool counts = !placed.parameter.counts_elsewhere && is_there[placed.page];
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

std::vector<int> NormSummer::one_group() const {
  return slices_apart(std::vector<int>(pages_->parameters().size(), 0), 1);
}

std::function<void(const at::Tensor& gradient)> NormSummer::note_passing(size_t page) {
  Passed& passed = passed_[page];
  if (passed.table == nullptr) {
    const std::vector<int> group_of = one_group();
    passed.table = std::make_shared<const optim::NormTable>(
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
void NormSummer::check_one_group(const std::vector<int>& group_of) const {
  const bool is_one =
      std::all_of(group_of.begin(), group_of.end(), [](int group) { return group == 0; });
  ZP_CHECK(is_one,
           "norms of gradients by group: backward has updated their pages and freed them "
           "(options.offload.step is StepWhen::kInBackward); use StepWhen::kInStep");
}

void NormSummer::add_own(const at::Tensor& words) const {
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

bool NormSummer::any_on_device() const {
  return std::any_of(tables_.of_pages.begin(), tables_.of_pages.end(), [&](const OfPage& of_page) {
    return !gradients_->owned(of_page.page).is_cpu();
  });
}

NormSums NormSummer::sum(const std::vector<int>& group_of, size_t groups, const ExactSum& weight) {
  const device::NamedRange range("GradientSummer::sum");
  const c10::Device device = pages_->world().communicator().device();
  SumsOfRank own = nothing_of(sums_of(groups), group_of.size());
  own.weight = weight;
  own.multiplied_by = scale_.take();
  // Without values there is nothing to add.
  if (!device.is_meta()) {
    if (!passed_.empty()) check_one_group(group_of);
    make_tables(group_of, groups);
    device::ArrivingCopy of_device;
    if (any_on_device()) {
      const at::Tensor words = tables_.sizes.make_words(device);
      add_own(words);
      of_device = device::start_copy_to_host(words);
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

ExactSum NormSummer::sum_weight(const ExactSum& weight) const {
  SumsOfRank own;
  own.weight = weight;
  return over_all_ranks(*pages_, *agreement_, std::move(own),
                        "the weight of a step's micro-batches")
      .weight;
}

bool NormSummer::can_start() const {
  // Stages tell each other by their hosts.
  if (pipeline_world_of(*pages_) != nullptr) return false;
  const c10::Device device = pages_->world().communicator().device();
  if (!device::has_streams(device.type())) return false;
  for (size_t page = 0; page < pages_->layouts().size(); ++page) {
    if (!pages_->layouts()[page].requires_grad) continue;
    const at::Tensor gradient = gradients_->owned(page);
    if (gradient.defined() && gradient.device() != device) return false;
  }
  return true;
}

NormSummer::Started NormSummer::start(const std::vector<int>& group_of, size_t groups) {
  const device::NamedRange range("GradientSummer::start");
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
  const std::string what = kExchangeOfSums + pages_->of_model();
  if (world.size() > 1) world.communicator().all_gather(of_slice, what).wait();
  if (group != nullptr) group->communicator().all_gather(rows, what).wait();
  const at::Tensor flags =
      rows.view({-1, words}).narrow(1, words - sizes.flag_words(), sizes.flag_words());
  Started started{.found_inf = flags.ne(0).any().to(at::kFloat).view({1}), .arrived = {}};
  const device::ArrivingCopy copy = device::start_copy_to_host(rows);
  started.arrived = [copy, sizes, slices, is_sliced = group != nullptr, ranks = world.size(),
                     squares = ranks_of_squares(*pages_),
                     noise = noise_of_whole_gradients(*pages_)] {
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
    return told(is_sliced ? over_slices(by_slice, noise) : std::move(by_slice.front()));
  };
  return started;
}

}  // namespace zeropage::zero
