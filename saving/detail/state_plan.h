// What a state consists of: every tensor's place in its files, alike on all ranks and whatever the
// model is sharded over (saving/STATE_FORMAT.md).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "zero/update/sharded_updates.h"
#include "zeropage/detail/model_ref.h"
#include "zeropage/saved_state.h"
#include "zeropage/saving.h"
#include "zeropage/world.h"

namespace zeropage::saving {

// "exp_avg" of "blocks.0.weight" in the file of the optimizer.
std::string state_name(const std::string& parameter, const std::string& state);
inline constexpr const char* kStepState = "step";        // int64, steps made
inline constexpr const char* kMasterState = "master";    // fp32, of a weight in a lower precision
inline constexpr const char* kAverageState = "average";  // fp32, of a weight: RunState::average

state::Dtype state_dtype(at::ScalarType dtype);
at::ScalarType scalar_type(state::Dtype dtype);
std::vector<uint64_t> shape_of(at::IntArrayRef sizes);

// In a file of weights that are saved so.
at::ScalarType saved_dtype(at::ScalarType dtype, WeightsAs weights_as);

// Whether the optimizer keeps fp32 values of what is in the page in a lower precision.
bool has_exact_values(const zero::PageParts& parts, size_t page);

class PlannedFile {
 public:
  PlannedFile(std::string name, std::vector<state::TensorEntry> tensors,
              const std::map<std::string, std::string>& metadata);

  const std::string& name() const { return name_; }
  const std::string& prefix() const { return prefix_; }  // the first bytes, up to the data
  uint64_t bytes() const { return bytes_; }
  // In the file, of an element of the tensor.
  uint64_t offset(const std::string& tensor, int64_t element = 0) const;

 private:
  std::string name_;
  std::string prefix_;
  uint64_t bytes_ = 0;
  std::vector<state::TensorEntry> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
};

// Throws where ranks have parts of the model, but ranks of all of them are not known to it.
void check_has_all_slices(const ModelRef& model);

struct StatePlan {
  int64_t step = 0;
  PlannedFile weights;
  std::string prefix = {};  // of names in `weights`
  WeightsAs weights_as = WeightsAs::kInModule;
  std::optional<PlannedFile> optimizer;
  WeightAverage* average = nullptr;  // the run's
  // Steps made on each parameter that has states, by its name.
  std::map<std::string, int64_t> steps;
  nlohmann::json content;  // of the manifest

  uint64_t bytes() const { return weights.bytes() + (optimizer ? optimizer->bytes() : 0); }
};

// What was written to parameters is in what ranks own from here on. optimizer: null for weights alone.
// Collective: ranks tell each other in `texts` what states they have. Throws on all ranks alike, also
// where they differ in `run`, and where `options` would make weights others than the module's in a whole
// state.
StatePlan plan_state(const comm::World& texts, const ModelRef& model, ShardedOptimizer* optimizer,
                     const RunState& run, const SaveOptions& options);

}  // namespace zeropage::saving
