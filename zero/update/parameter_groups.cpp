#include "zero/update/parameter_groups.h"

#include <algorithm>
#include <utility>

#include "memory/check.h"
#include "zero/update/option_words.h"

namespace zeropage {

ParameterGroups::ParameterGroups(std::shared_ptr<const ParameterPages> pages,
                                 const Options& options, const Groups& groups)
    : pages_(std::move(pages)),
      options_(options),
      groups_(groups),
      grouped_(pages_->parameters().size()) {}

std::vector<size_t> ParameterGroups::parameters_of(size_t group) const {
  std::vector<size_t> indices;  // each parameter once
  const auto& tensors = groups_[group].params();
  for (size_t position = 0; position < tensors.size(); ++position) {
    const int64_t index = pages_->index_of(tensors[position]);
    ZP_CHECK(index >= 0, "parameter ", position, " of group ", group, " (sizes ",
             tensors[position].sizes(),
             ") is not a parameter of the wrapped module; optimizers step what was wrapped only");
    // LibTorch lists a tied parameter under each of its names.
    if (std::find(indices.begin(), indices.end(), static_cast<size_t>(index)) == indices.end()) {
      indices.push_back(static_cast<size_t>(index));
    }
  }
  return indices;
}

std::vector<std::vector<size_t>> ParameterGroups::adopt(size_t first) {
  std::vector<std::vector<size_t>> adopted;
  for (size_t group = first; group < groups_.size(); ++group) {
    adopted.push_back(parameters_of(group));
    for (const size_t index : adopted.back()) {
      ZP_CHECK(!grouped_[index], "parameter \"", name(index),
               "\" appears in two parameter groups; keep one");
      grouped_[index] = true;
    }
  }
  return adopted;
}

OwnedGroup ParameterGroups::owned(size_t page, size_t group,
                                  const std::vector<size_t>& parameters) const {
  const Range owned = pages_->owned(page);
  OwnedGroup result{{}, options(group).clone()};
  for (const size_t index : parameters) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (placed.page != page) continue;
    const Range range = intersection(owned, placed.range);
    if (range.empty()) continue;
    const Range padding = intersection(owned, pages_->layouts()[page].padding_after(range.end));
    result.shards.push_back({index,
                             {range.begin - owned.begin, range.end - owned.begin},
                             range.begin - placed.range.begin,
                             padding.numel(),
                             state_format_of(options_, placed.range.numel()),
                             !placed.parameter.tensor.requires_grad()});
  }
  return result;
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
  for (size_t group = 0; group < groups_.size(); ++group) {
    const std::string prefix = c10::str("group ", group, " ");
    for (const size_t index : parameters_of(group)) {
      lines.push_back(c10::str(prefix, "parameter: ", name(index)));
    }
  }
  zeropage::check_agreement(*pages_, "the optimizer", lines);
}

}  // namespace zeropage
