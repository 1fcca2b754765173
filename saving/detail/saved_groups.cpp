#include "saving/detail/saved_groups.h"

#include <set>
#include <utility>

#include "zero/update/archive_values.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/saved_state.h"

namespace zeropage::saving {

using nlohmann::json;

SavedGroups::SavedGroups(std::string state, const json& optimizer)
    : state_(std::move(state)), optimizer_(optimizer) {
  const json& groups = optimizer_.at("groups");
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const json& name : groups[group].at("parameters")) {
      group_of_.emplace(name.get<std::string>(), group);
    }
  }
}

const json* SavedGroups::options_of(ShardedOptimizer& optimizer, size_t group,
                                    const zero::PlacedParameters& model_parameters,
                                    const NameInState& in_state) const {
  if (optimizer_.at("class") != optimizer.class_name()) return nullptr;
  const json& groups = optimizer_.at("groups");
  const std::vector<size_t> parameters = updates_of(optimizer).parameters_of_group(group);
  // A stage of a pipeline may have none of the group's parameters.
  if (parameters.empty() && groups.size() == optimizer.param_groups().size()) {
    return &groups[group].at("options");
  }
  const json* found = nullptr;
  std::string first;
  for (const size_t index : parameters) {
    const std::string& name = model_parameters[index].parameter.name();
    const auto known = group_of_.find(in_state(name));
    if (known == group_of_.end()) continue;
    const json& options = groups[known->second].at("options");
    if (found == nullptr) {
      first = name;
      found = &options;
    }
    if (*found != options) {
      throw state::StateError(
          state_, 0,
          "the parameters of group " + std::to_string(group) + " in groups of the same options",
          "\"" + first + "\" with " + found->dump() + " and \"" + name + "\" with " +
              options.dump(),
          "make groups of the parameters that the state's have, or load with "
          "LoadOptions::optimizer_options = false, which keeps this run's options");
    }
  }
  return found;
}

void SavedGroups::check(ShardedOptimizer& optimizer, const zero::PlacedParameters& model_parameters,
                        const NameInState& in_state) const {
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    options_of(optimizer, group, model_parameters, in_state);
  }
}

void SavedGroups::load(ShardedOptimizer& optimizer, const zero::PlacedParameters& model_parameters,
                       const NameInState& in_state) const {
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const json* const saved = options_of(optimizer, group, model_parameters, in_state);
    if (saved == nullptr) continue;
    auto& options = optimizer.param_groups()[group].options();
    zero::load_json(*saved, [&](auto& from) { options.serialize(from); });
  }
}

void SavedGroups::tell_others(ShardedOptimizer& optimizer,
                              const zero::PlacedParameters& model_parameters,
                              const NameInState& in_state, std::vector<std::string>& notes) const {
  if (optimizer_.at("class") != optimizer.class_name()) return;
  const json& groups = optimizer_.at("groups");
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const json own = zero::saved_json(optimizer.class_name() + "Options", [&](auto& to) {
      optimizer.param_groups()[group].options().serialize(to);
    });
    std::set<std::string> different;
    for (const size_t index : updates_of(optimizer).parameters_of_group(group)) {
      const auto known = group_of_.find(in_state(model_parameters[index].parameter.name()));
      if (known == group_of_.end()) continue;
      const json& saved = groups[known->second].at("options");
      for (const auto& [name, value] : own.items()) {
        if (!saved.contains(name) || saved.at(name) == value) continue;
        different.insert(name + " " + saved.at(name).dump() + ", now " + value.dump());
      }
    }
    if (different.empty()) continue;
    std::string words;
    for (const std::string& one : different) words += (words.empty() ? "" : "; ") + one;
    notes.push_back("parameter group " + std::to_string(group) +
                    " has other options than the state: " + words);
  }
}

}  // namespace zeropage::saving
