#include "zero/update/parameter_groups.h"

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

#include "zero/update/option_words.h"
#include "zeropage/check.h"

namespace zeropage::zero {

ParameterGroups::ParameterGroups(std::shared_ptr<const ParameterPages> pages,
                                 const Options& options, const Groups& groups)
    : pages_(std::move(pages)),
      options_(options),
      groups_(groups),
      grouped_(pages_->parameters().size()),
      of_pages_(pages_->layouts().size()) {}

std::vector<size_t> ParameterGroups::parameters_of(size_t group) const {
  std::vector<size_t> indices;  // each parameter once
  std::unordered_set<size_t> seen;
  const auto& tensors = groups_[group].params();
  for (size_t position = 0; position < tensors.size(); ++position) {
    const int64_t index = pages_->parameters().index_of(tensors[position]);
    ZP_CHECK(index >= 0, "parameter ", position, " of group ", group, " (sizes ",
             tensors[position].sizes(),
             ") is not a parameter of the wrapped module; optimizers step what was wrapped only");
    // LibTorch lists a tied parameter under each of its names.
    if (seen.insert(static_cast<size_t>(index)).second) {
      indices.push_back(static_cast<size_t>(index));
    }
  }
  return indices;
}

void ParameterGroups::adopt(size_t first) {
  for (size_t group = first; group < groups_.size(); ++group) {
    for (const size_t index : parameters_of(group)) {
      ZP_CHECK(!grouped_[index], "parameter \"", name(index),
               "\" appears in two parameter groups; keep one");
      grouped_[index] = true;
      of_pages_[pages_->parameters()[index].page].push_back({group, index});
    }
    std::vector<const c10::TensorImpl*>& impls = adopted_.emplace_back();
    for (const at::Tensor& tensor : groups_[group].params()) {
      impls.push_back(tensor.unsafeGetTensorImpl());
    }
  }
}

void ParameterGroups::check_unedited() const {
  constexpr const char* kWhatToDo =
      "; leave groups as they were made, freeze a parameter by requires_grad_(false), and set an "
      "option such as lr to 0 to leave a group out; or make the optimizer anew";
  ZP_CHECK(groups_.size() >= adopted_.size(), "step(): expected the optimizer's ", adopted_.size(),
           " parameter groups, got ", groups_.size(), kWhatToDo);
  for (size_t group = 0; group < adopted_.size(); ++group) {
    const std::vector<at::Tensor>& now = groups_[group].params();
    const bool is_same = std::equal(
        now.begin(), now.end(), adopted_[group].begin(), adopted_[group].end(),
        [](const at::Tensor& tensor, auto* impl) { return tensor.unsafeGetTensorImpl() == impl; });
    ZP_CHECK(is_same, "step(): expected parameter group ", group, " with the ",
             adopted_[group].size(), " parameters that it was made of, got ", now.size(),
             now.size() == adopted_[group].size() ? ", others among them" : "", kWhatToDo);
  }
}

std::vector<OwnedGroup> ParameterGroups::owned(size_t page, size_t first) const {
  const std::vector<Member>& members = of_pages_[page];
  std::vector<OwnedGroup> groups;
  const auto begin = std::partition_point(
      members.begin(), members.end(), [=](const Member& member) { return member.group < first; });
  for (auto member = begin; member != members.end(); ++member) {
    ParameterShard shard = shard_of(pages_->parameters()[member->parameter], member->parameter);
    if (shard.range.empty()) continue;
    if (groups.empty() || groups.back().number != member->group) {
      groups.push_back({member->group, {}, options(member->group).clone()});
    }
    groups.back().shards.push_back(std::move(shard));
  }
  return groups;
}

ParameterShard ParameterGroups::shard_of(const PlacedParameter& placed, size_t parameter) const {
  const Range owned = pages_->owned(placed.page);
  const Range range = intersection(owned, placed.range);
  const Range padding =
      intersection(owned, pages_->layouts()[placed.page].padding_after(range.end));
  return {.parameter = parameter,
          .range = {range.begin - owned.begin, range.end - owned.begin},
          .first_element = range.begin - placed.range.begin,
          .padding = padding.numel(),
          .sizes = placed.parameter.tensor.sizes().vec(),
          .state_format = state_format_of(options_, placed.range.numel()),
          .frozen = !placed.parameter.tensor.requires_grad()};
}

void ParameterGroups::check_agreement(const std::string& class_name) const {
  std::vector<std::string> lines = {c10::str("optimizer: ", class_name),
                                    c10::str("parameter groups: ", groups_.size())};
  for (size_t group = 0; group < groups_.size(); ++group) {
    const std::string prefix = c10::str("group ", group, " ");
    for (const auto& [option, value] : option_words(options(group))) {
      lines.push_back(c10::str(prefix, option, ": ", value));
    }
  }
  check_stages_agree(*pages_, "the optimizer", lines);
  check_ends_agree();
  for (size_t group = 0; group < groups_.size(); ++group) {
    const std::string prefix = c10::str("group ", group, " ");
    for (const size_t index : parameters_of(group)) {
      lines.push_back(c10::str(prefix, "parameter: ", name(index)));
    }
  }
  zeropage::zero::check_agreement(*pages_, "the optimizer", lines);
}

// A tied weight is updated on both stages that have it, and stays one weight if both do the same.
void ParameterGroups::check_ends_agree() const {
  const auto& part = pages_->part();
  if (!part || !part->tied) return;
  std::map<size_t, size_t> group_of;
  for (size_t group = 0; group < groups_.size(); ++group) {
    for (const size_t index : parameters_of(group)) group_of.emplace(index, group);
  }
  std::vector<std::string> lines;
  for (size_t index = 0; index < pages_->parameters().size(); ++index) {
    if (!pages_->parameters()[index].parameter.is_tied) continue;
    const auto found = group_of.find(index);
    lines.push_back(c10::str(
        "tied parameter \"", name(index), "\": ",
        found == group_of.end() ? "in none of its groups" : c10::str("in group ", found->second)));
  }
  // Each stage has them in the order of its own layers.
  std::sort(lines.begin(), lines.end());
  part->tied->check_agreement("the optimizer, over the two stages that have a tied weight", lines);
}

}  // namespace zeropage::zero
