// A state's tensors into what this rank owns of a model and its optimizer.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "saving/detail/saved_groups.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/detail/model_ref.h"
#include "zeropage/saved_state.h"
#include "zeropage/saving.h"

namespace zeropage::saving {

// Threads: the training thread. Nothing here is collective.
class StateLoading {
 public:
  // optimizer: null for weights alone. average: null where the run has none. All outlive it.
  StateLoading(const state::SavedState& saved, const ModelRef& model, ShardedOptimizer* optimizer,
               WeightAverage* average, const LoadOptions& options);

  // What is missing in the state, and what is left over, of what this rank knows. Throws for another
  // shape, and for an optimizer of another class.
  void match(LoadReport& report) const;

  // Shards of pages that are whole are to be gathered afterwards.
  void load_weights();
  void load_optimizer();
  void load_average();

 private:
  struct Source {
    const state::TensorFile* file = nullptr;
    const state::TensorEntry* entry = nullptr;

    explicit operator bool() const { return entry != nullptr; }
  };

  std::string name_in_state(const std::string& name) const;
  Source weight(const zero::NamedParameter& named) const;
  Source weight(const std::vector<std::string>& names) const;
  Source optimizer_state(const std::string& parameter, const std::string& state) const;
  // The values of most digits: fp32 master weights where there are any.
  Source exact(const zero::NamedParameter& named) const;
  bool knows_states_of(const std::string& parameter) const;

  void match_weights(LoadReport& report) const;
  void match_states(LoadReport& report) const;
  void match_average(LoadReport& report) const;
  void match_optimizer() const;
  static void check_shape(const Source& source, const std::string& name,
                          const std::vector<int64_t>& whole_sizes);

  void load_page(size_t page);
  void load_frozen();
  void load_parameter(const zero::PlacedParameter& placed, const zero::MasterWeights::Owned& owned);
  void load_shard(size_t page, zero::OwnedState& owned);
  // Elements of the source from `first` on into `to`: flat, any dtype and device.
  void read(const Source& source, int64_t first, const at::Tensor& to);

  const state::SavedState& saved_;
  const ModelRef& model_;
  ShardedOptimizer* const optimizer_;
  WeightAverage* const average_;
  const LoadOptions& options_;
  const zero::ParameterPages& pages_;
  const zero::MasterWeights& masters_;
  std::map<std::string, std::vector<std::string>> states_;  // by parameter, as the file has them
  // None where the state is weights alone.
  std::optional<SavedGroups> groups_;
  // A file has the states of all parameters one state behind the other, and they are read by turns: each by a reader
  // of its own, or every read would be of another block.
  using Stream = std::pair<const state::TensorFile*, std::string>;
  std::map<Stream, state::BlockReader> readers_;
};

}  // namespace zeropage::saving
