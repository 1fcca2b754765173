// The parameter groups of a saved optimizer: who was in which, and with which options. A group of the
// running optimizer gets the options that its parameters had, so a script may make its groups in another
// order.
//
// Lifetime: the manifest outlives it. Threads: any. Throws StateError as the functions say.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "zero/pages/placed_parameters.h"
#include "zeropage/optimizer.h"

namespace zeropage::saving {

class SavedGroups {
 public:
  // The model's name of a parameter -> the state's.
  using NameInState = std::function<std::string(const std::string&)>;

  // optimizer: content.optimizer of the manifest (STATE_FORMAT.md). state: for messages.
  SavedGroups(std::string state, const nlohmann::json& optimizer);

  // Whether the optimizer had that parameter; it may have no state as long as it had no gradient.
  bool has(const std::string& name_in_state) const { return group_of_.contains(name_in_state); }

  // Throws where parameters of one group had different options. Changes nothing.
  void check(ShardedOptimizer& optimizer, const zero::PlacedParameters& model_parameters,
             const NameInState& in_state) const;
  // Gives the groups their options. REQUIRES: check() did not throw.
  void load(ShardedOptimizer& optimizer, const zero::PlacedParameters& model_parameters,
            const NameInState& in_state) const;
  // Adds a note for each group that has other options than its parameters had.
  void tell_others(ShardedOptimizer& optimizer, const zero::PlacedParameters& model_parameters,
                   const NameInState& in_state, std::vector<std::string>& notes) const;

 private:
  // Null: the state has none for the group, or those of another class.
  const nlohmann::json* options_of(ShardedOptimizer& optimizer, size_t group,
                                   const zero::PlacedParameters& model_parameters,
                                   const NameInState& in_state) const;

  const std::string state_;
  const nlohmann::json& optimizer_;
  std::unordered_map<std::string, size_t> group_of_;  // by the state's names
};

}  // namespace zeropage::saving
