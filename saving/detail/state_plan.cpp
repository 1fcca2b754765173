#include "saving/detail/state_plan.h"

#include <algorithm>
#include <array>
#include <set>
#include <unordered_map>
#include <utility>

#include "saving/detail/collective_errors.h"
#include "saving/detail/run_json.h"
#include "saving/detail/saved_generators.h"
#include "zero/averaged_pages.h"
#include "zero/model_parts.h"
#include "zero/update/archive_values.h"
#include "zeropage/accumulator.h"
#include "zeropage/check.h"
#include "zeropage/saved_state.h"
#include "zeropage/weight_average.h"

namespace zeropage::saving {
namespace {

using nlohmann::json;
using state::TensorEntry;

constexpr std::array<std::pair<at::ScalarType, state::Dtype>, 10> kDtypes = {
    {{at::kBool, state::Dtype::kBool},
     {at::kByte, state::Dtype::kU8},
     {at::kChar, state::Dtype::kI8},
     {at::kShort, state::Dtype::kI16},
     {at::kHalf, state::Dtype::kF16},
     {at::kBFloat16, state::Dtype::kBF16},
     {at::kInt, state::Dtype::kI32},
     {at::kFloat, state::Dtype::kF32},
     {at::kLong, state::Dtype::kI64},
     {at::kDouble, state::Dtype::kF64}}};

// In place, so that each tensor begins at a multiple of its elements' size; others keep their order.
void order_by_size(std::vector<TensorEntry>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return state::size_of(a.dtype) > state::size_of(b.dtype);
  });
}

// The names that a tensor is not stored under, as safetensors.torch.save_model() writes them.
void add_aliases(std::map<std::string, std::string>& metadata,
                 const std::vector<std::string>& names, const std::string& prefix) {
  for (size_t i = 1; i < names.size(); ++i) {
    metadata[prefix + names[i]] = prefix + names.front();
  }
}

// A parameter or a buffer of the whole model, as files have it.
struct TensorOfState {
  std::vector<std::string> names;
  std::vector<uint64_t> shape;
  at::ScalarType dtype;
  bool has_exact_values = false;
};

// Its number among the whole model's.
size_t place_in_model(const ModelRef& model, size_t index) {
  const zero::ParameterPages& pages = *model->sharded().pages;
  if (zero::pipeline_world_of(pages) == nullptr) return model->place(index);
  return pages.part()->own.at(pages.parameters()[index].parameter.tensor.unsafeGetTensorImpl());
}

// What the other stages of a pipeline cannot know of this one's parameters: by their places, the dtype and whether
// there are fp32 values.
json own_parameters(const ModelRef& model) {
  json own = json::object();
  const zero::ParameterPages& pages = *model->sharded().pages;
  if (zero::pipeline_world_of(pages) == nullptr) return own;
  for (size_t index = 0; index < pages.parameters().size(); ++index) {
    const size_t page = pages.parameters()[index].page;
    const char* const dtype = state::name_of(state_dtype(pages.layouts()[page].dtype));
    own[std::to_string(place_in_model(model, index))] = {dtype,
                                                         has_exact_values(model->sharded(), page)};
  }
  return own;
}

// told: own_parameters() of all stages.
std::vector<TensorOfState> parameters_of_state(const ModelRef& model, const json& told) {
  std::vector<TensorOfState> parameters;
  const zero::ParameterPages& pages = *model->sharded().pages;
  if (zero::pipeline_world_of(pages) == nullptr) {
    parameters.resize(model->parameters().size());
    for (size_t index = 0; index < parameters.size(); ++index) {
      const zero::PlacedParameter& placed = model->parameters()[index];
      parameters[model->place(index)] = {
          placed.parameter.names, shape_of(placed.parameter.whole_sizes()),
          pages.layouts()[placed.page].dtype, has_exact_values(model->sharded(), placed.page)};
    }
    return parameters;
  }
  for (size_t place = 0; place < pages.part()->parameters.size(); ++place) {
    const TensorOfModel& of = pages.part()->parameters[place];
    const json& known = told.at(std::to_string(place));
    parameters.push_back(
        {of.names, shape_of(of.sizes), scalar_type(state::dtype_of(known.at(0))), known.at(1)});
  }
  return parameters;
}

std::vector<TensorOfState> buffers_of_state(const ModelRef& model) {
  std::vector<TensorOfState> buffers;
  const zero::ParameterPages& pages = *model->sharded().pages;
  if (zero::pipeline_world_of(pages) != nullptr) {
    for (const TensorOfModel& of : pages.part()->buffers) {
      buffers.push_back({of.names, shape_of(of.sizes), of.dtype});
    }
    return buffers;
  }
  for (const zero::NamedParameter& named : model->buffers()) {
    buffers.push_back({named.names, shape_of(named.tensor.sizes()), named.tensor.scalar_type()});
  }
  return buffers;
}

PlannedFile plan_weights(const ModelRef& model, const std::vector<TensorOfState>& parameters,
                         const SaveOptions& options) {
  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  const auto add = [&](const TensorOfState& of) {
    tensors.push_back({.name = options.prefix + of.names.front(),
                       .dtype = state_dtype(saved_dtype(of.dtype, options.weights_as)),
                       .shape = of.shape});
    add_aliases(metadata, of.names, options.prefix);
  };
  for (const TensorOfState& parameter : parameters) add(parameter);
  for (const TensorOfState& buffer : buffers_of_state(model)) add(buffer);
  return {state::kWeightsFile, std::move(tensors), metadata};
}

// What one rank, or all together, know of the states of a parameter.
struct KnownStates {
  struct Tensor {
    std::string name;
    at::ScalarType dtype;
    std::optional<std::vector<uint64_t>> shape = std::nullopt;  // none: the parameter's
  };
  int64_t steps = 0;
  std::vector<Tensor> tensors;
};

void to_json(json& to, const KnownStates& known) {
  to = {{"steps", known.steps}, {"tensors", json::array()}};
  for (const auto& [name, dtype, shape] : known.tensors) {
    to["tensors"].push_back({name, state::name_of(state_dtype(dtype))});
    if (shape) to["tensors"].back().push_back(*shape);
  }
}

// By the parameter's place in the model, of this rank.
json own_states(const ModelRef& model, ShardedOptimizer& optimizer) {
  std::map<size_t, KnownStates> known;
  updates_of(optimizer).visit_states(
      zero::StateAccess::kDescribe, [&](size_t, zero::OwnedState& owned) {
        if (owned.tensors.empty() && owned.whole_tensors.empty() && owned.steps == 0) return;
        KnownStates& of = known[owned.parameter];
        if (!of.tensors.empty()) return;
        of.steps = owned.steps;
        for (const auto& [name, values] : owned.tensors) {
          of.tensors.push_back({name, values.scalar_type()});
        }
        for (const auto& [name, values] : owned.whole_tensors) {
          of.tensors.push_back({name, values.scalar_type(), shape_of(values.sizes())});
        }
      });
  json own = json::object();
  for (const auto& [parameter, of] : known)
    own[std::to_string(place_in_model(model, parameter))] = of;
  return own;
}

// A rank that owns nothing of a parameter does not know its states.
json merged(const std::vector<json>& by_rank) {
  json all = json::object();
  for (const json& told : by_rank) {
    for (const auto& [parameter, known] : told.at("states").items()) {
      if (!all.contains(parameter)) all[parameter] = known;
      ZP_CHECK(all[parameter] == known, "parameter ", parameter, " has states ",
               all[parameter].dump(), " on one rank and ", known.dump(),
               " on another; this is an error of Zeropage");
    }
  }
  return all;
}

PlannedFile plan_optimizer(const std::vector<TensorOfState>& parameters, const json& states,
                           bool with_average, std::map<std::string, int64_t>& steps) {
  std::vector<TensorEntry> tensors;
  std::vector<std::string> state_names;
  std::map<std::string, std::vector<TensorEntry>> by_state;
  for (size_t index = 0; index < parameters.size(); ++index) {
    const TensorOfState& parameter = parameters[index];
    const std::string& name = parameter.names.front();
    const auto add = [&](const std::string& state, state::Dtype dtype,
                         const std::vector<uint64_t>& shape) {
      if (!by_state.contains(state)) state_names.push_back(state);
      by_state[state].push_back({state_name(name, state), dtype, shape});
    };
    if (parameter.has_exact_values) add(kMasterState, state::Dtype::kF32, parameter.shape);
    if (with_average) add(kAverageState, state::Dtype::kF32, parameter.shape);
    const auto known = states.find(std::to_string(index));
    if (known == states.end()) continue;
    steps[name] = known->at("steps");
    tensors.push_back({state_name(name, kStepState), state::Dtype::kI64, {}});
    for (const json& tensor : known->at("tensors")) {
      add(tensor.at(0), state::dtype_of(tensor.at(1)),
          tensor.size() > 2 ? tensor.at(2).get<std::vector<uint64_t>>() : parameter.shape);
    }
  }
  for (const std::string& state : state_names) {
    for (TensorEntry& entry : by_state[state]) tensors.push_back(std::move(entry));
  }
  return {state::kOptimizerFile, std::move(tensors), {}};
}

json merged_parameters(const std::vector<json>& by_rank) {
  json all = json::object();
  for (const json& told : by_rank) all.update(told.at("parameters"));
  return all;
}

void check_average(const ModelRef& model, const RunState& run, const SaveOptions& options) {
  ZP_CHECK(options.weights_as != WeightsAs::kAverage || run.average != nullptr,
           "saving state: WeightsAs::kAverage needs RunState::average, which is null");
  if (run.average == nullptr) return;
  ZP_CHECK(pages_of(*run.average).averages(*model->sharded().pages),
           "saving state: RunState::average is of another model; give this one's");
  ZP_CHECK(!run.average->is_swapped_in(),
           "saving state: the model has the average, and its own values are not in it; call "
           "WeightAverage::swap_out() first");
}

// The places of each group's parameters, of this rank.
json own_groups(ShardedOptimizer& optimizer, const ModelRef& model) {
  json groups = json::array();
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    json places = json::array();
    for (const size_t index : updates_of(optimizer).parameters_of_group(group)) {
      places.push_back(place_in_model(model, index));
    }
    groups.push_back(std::move(places));
  }
  return groups;
}

// In the user's order; where stages have some each, in the model's.
json merged_groups(const std::vector<json>& by_rank) {
  json merged = by_rank.front().at("groups");
  for (size_t group = 0; group < merged.size(); ++group) {
    std::set<size_t> places;
    for (const json& told : by_rank) {
      for (const size_t place : told.at("groups").at(group)) places.insert(place);
    }
    if (places.size() != merged[group].size()) merged[group] = places;
  }
  return merged;
}

// places: of all ranks.
json groups_of(const ShardedOptimizer& optimizer, const std::vector<TensorOfState>& parameters,
               const json& places) {
  json groups = json::array();
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    json names = json::array();
    for (const size_t place : places.at(group)) names.push_back(parameters[place].names.front());
    const auto& options = optimizer.param_groups()[group].options();
    groups.push_back({{"options", zero::saved_json(optimizer.class_name() + "Options",
                                                   [&](auto& to) { options.serialize(to); })},
                      {"parameters", std::move(names)}});
  }
  return groups;
}

// What ranks must have alike in a state (zero/agreement/rank_agreement.h). Weights alone have no options.
json own_told(const zero::ShardedModel& sharded, bool with_options) {
  const zero::AgreementHashes told = sharded.agreement->own_hashes();
  return {{"steps", told.steps},
          {"settings", with_options ? told.settings : 0},
          {"values", sharded.agreement->values_now()}};
}

bool differ(const std::vector<json>& by_rank) {
  std::map<std::string, json> known;
  const json& first = by_rank.front().at("told");
  return std::any_of(by_rank.begin(), by_rank.end(), [&](const json& of_rank) {
    const json& told = of_rank.at("told");
    bool differs =
        told.at("steps") != first.at("steps") || told.at("settings") != first.at("settings");
    for (const auto& [key, values] : told.at("values").items()) {
      differs |= known.try_emplace(key, values).first->second != values;
    }
    return differs;
  });
}

}  // namespace

std::string state_name(const std::string& parameter, const std::string& state) {
  return parameter + ":" + state;
}

state::Dtype state_dtype(at::ScalarType dtype) {
  for (const auto& [ours, theirs] : kDtypes) {
    if (ours == dtype) return theirs;
  }
  ZP_THROW("a tensor of ", dtype, " has no dtype in safetensors; convert it");
}

at::ScalarType scalar_type(state::Dtype dtype) {
  for (const auto& [ours, theirs] : kDtypes) {
    if (theirs == dtype) return ours;
  }
  ZP_THROW("a tensor of ", state::name_of(dtype),
           " in a file; LibTorch's operators do not take it");
}

std::vector<uint64_t> shape_of(at::IntArrayRef sizes) {
  return {sizes.begin(), sizes.end()};
}

at::ScalarType saved_dtype(at::ScalarType dtype, WeightsAs weights_as) {
  return weights_as != WeightsAs::kInModule && is_low_precision(dtype) ? at::kFloat : dtype;
}

bool has_exact_values(const zero::PageParts& parts, size_t page) {
  return is_low_precision(parts.pages->layouts()[page].dtype) &&
         (parts.masters->copy(page).defined() || parts.masters->remainders(page).defined());
}

PlannedFile::PlannedFile(std::string name, std::vector<TensorEntry> tensors,
                         const std::map<std::string, std::string>& metadata)
    : name_(std::move(name)), tensors_(std::move(tensors)) {
  order_by_size(tensors_);
  const uint64_t data = state::place_in_order(tensors_);
  prefix_ = state::safetensors_prefix(tensors_, metadata);
  bytes_ = prefix_.size() + data;
  for (size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace(tensors_[i].name, i);
}

uint64_t PlannedFile::offset(const std::string& tensor, int64_t element) const {
  const TensorEntry& entry = tensors_[by_name_.at(tensor)];
  return prefix_.size() + entry.begin +
         static_cast<uint64_t>(element) * state::size_of(entry.dtype);
}

void check_has_all_slices(const ModelRef& model) {
  const zero::ParameterPages& pages = *model->sharded().pages;
  const comm::World* const slices = pages.tensor_world();
  const comm::World* const stages = zero::pipeline_world_of(pages);
  const int parts =
      (slices == nullptr ? 1 : slices->size()) * (stages == nullptr ? 1 : stages->size());
  ZP_CHECK(
      parts == 1 || model->all_ranks().size() == model->world().size() * parts,
      "saving or loading state: each of ", parts,
      " ranks has slices of parameters, or other layers, and they are one state together; wrap the "
      "module over the whole mesh: DistributedDataParallel(module, Mesh(world, "
      "{{\"pipeline\", ...}, {\"data\", ...}, {\"tensor\", ...}}))");
}

StatePlan plan_state(const comm::World& texts, const ModelRef& model, ShardedOptimizer* optimizer,
                     const RunState& run, const SaveOptions& options) {
  const zero::ShardedModel& sharded = model->sharded();
  json own;
  const std::exception_ptr error = error_of([&] {
    ZP_CHECK(!model->world().device().is_meta(), "saving state: a simulated world has no values");
    check_has_all_slices(model);
    ZP_CHECK(optimizer == nullptr || updates_of(*optimizer).updates(*sharded.pages),
             "saving state: the optimizer is of another model; give this one's");
    ZP_CHECK(optimizer == nullptr ||
                 (options.prefix.empty() && options.weights_as == WeightsAs::kInModule),
             "saving state: SaveOptions::prefix and weights_as are save_weights()'s; a whole state "
             "has the module's names and dtypes, and fp32 master weights beside them");
    ZP_CHECK(run.accumulator == nullptr || run.accumulator->micro_step() == 0,
             "saving state: the accumulator has gradients of ", run.accumulator->micro_step(),
             " micro-batches, which are no part of a state; save after its step()");
    check_average(model, run, options);
    sharded.writes->take_over("save_state()");
    own = {{"progress", progress_json(run)},
           {"average", run.average != nullptr},
           {"step", run.step > 0 || optimizer == nullptr ? run.step : optimizer->steps()},
           {"random", own_generators(model)},
           {"parameters", own_parameters(model)},
           {"told", own_told(sharded, optimizer != nullptr)},
           {"states", optimizer == nullptr ? json::object() : own_states(model, *optimizer)},
           {"groups", optimizer == nullptr ? json::array() : own_groups(*optimizer, model)}};
  });
  const json all = settle(texts, "saving state", own, error, [](const auto& by_rank) -> json {
    std::vector<json> generators;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const json& told = by_rank[rank];
      for (const char* key : {"step", "progress", "average"}) {
        ZP_CHECK(told.at(key) == by_rank.front().at(key), "saving state: ", key, " of rank 0 is ",
                 by_rank.front().at(key).dump(), ", of rank ", rank, " ", told.at(key).dump(),
                 "; give the same RunState on all ranks");
      }
      generators.push_back(told.at("random"));
    }
    return {{"states", merged(by_rank)},
            {"parameters", merged_parameters(by_rank)},
            {"groups", merged_groups(by_rank)},
            {"random", merged_generators(generators)},
            {"differ", differ(by_rank)}};
  });
  if (all.at("differ")) sharded.agreement->settle(texts, "saving state");
  const std::vector<TensorOfState> parameters = parameters_of_state(model, all.at("parameters"));
  StatePlan plan{.step = own.at("step"),
                 .weights = plan_weights(model, parameters, options),
                 .prefix = options.prefix,
                 .weights_as = options.weights_as,
                 .average = run.average};
  plan.content = {{"progress", own.at("progress")}, {"random", all.at("random")}};
  if (optimizer == nullptr) return plan;
  plan.optimizer = plan_optimizer(parameters, all.at("states"), run.average != nullptr, plan.steps);
  plan.content["optimizer"] = {{"class", optimizer->class_name()},
                               {"groups", groups_of(*optimizer, parameters, all.at("groups"))},
                               {"updates", optimizer->steps()}};
  return plan;
}

}  // namespace zeropage::saving
