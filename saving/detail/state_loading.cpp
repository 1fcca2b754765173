#include "saving/detail/state_loading.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <ATen/ATen.h>

#include "memory/storage.h"
#include "saving/detail/element_runs.h"
#include "saving/detail/owned_weights.h"
#include "saving/detail/state_plan.h"
#include "zero/averaged_pages.h"
#include "zero/model_parts.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/saved_state.h"
#include "zeropage/weight_average.h"

namespace zeropage::saving {
namespace {

using nlohmann::json;
using state::StateError;

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (const uint64_t extent : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  }
  return text + "]";
}

// Before the last colon is the parameter.
std::pair<std::string, std::string> parts_of(const std::string& name) {
  const size_t colon = name.rfind(':');
  if (colon == std::string::npos) return {name, ""};
  return {name.substr(0, colon), name.substr(colon + 1)};
}

}  // namespace

StateLoading::StateLoading(const state::SavedState& saved, const ModelRef& model,
                           ShardedOptimizer* optimizer, WeightAverage* average,
                           const LoadOptions& options)
    : saved_(saved),
      model_(model),
      optimizer_(optimizer),
      average_(average),
      options_(options),
      pages_(*model->sharded().pages),
      masters_(*model->sharded().masters) {
  if (saved_.optimizer() == nullptr) return;
  for (const state::TensorEntry& entry : saved_.optimizer()->header().tensors) {
    const auto [parameter, state] = parts_of(entry.name);
    states_[parameter].push_back(state);
  }
  const json& content = saved_.manifest().content;
  if (!content.contains("optimizer")) return;
  groups_.emplace(saved_.directory().string(), content["optimizer"]);
}

std::string StateLoading::name_in_state(const std::string& name) const {
  const auto mapped = options_.names.find(name);
  return options_.prefix + (mapped == options_.names.end() ? name : mapped->second);
}

// A name may be an alias in the state and not in the model, and the other way round.
StateLoading::Source StateLoading::weight(const zero::NamedParameter& named) const {
  return weight(named.names);
}

StateLoading::Source StateLoading::weight(const std::vector<std::string>& names) const {
  const state::TensorFile& file = saved_.weights();
  for (const std::string& own : names) {
    const std::string name = name_in_state(own);
    if (const auto* const entry = file.find(name)) return {&file, entry};
    const auto alias = file.header().metadata.find(name);
    if (alias == file.header().metadata.end()) continue;
    if (const auto* const entry = file.find(alias->second)) return {&file, entry};
  }
  return {};
}

StateLoading::Source StateLoading::optimizer_state(const std::string& parameter,
                                                   const std::string& state) const {
  if (saved_.optimizer() == nullptr) return {};
  const auto* const entry = saved_.optimizer()->find(state_name(name_in_state(parameter), state));
  return {saved_.optimizer(), entry};
}

StateLoading::Source StateLoading::exact(const zero::NamedParameter& named) const {
  const Source master = optimizer_state(named.name(), kMasterState);
  return master ? master : weight(named);
}

bool StateLoading::knows_states_of(const std::string& parameter) const {
  return groups_.has_value() && groups_->has(name_in_state(parameter));
}

void StateLoading::check_shape(const Source& source, const std::string& name,
                               const std::vector<int64_t>& whole_sizes) {
  const std::vector<uint64_t> shape = shape_of(whole_sizes);
  if (source.entry->shape == shape) return;
  throw StateError(source.file->name(), source.file->header().data_begin + source.entry->begin,
                   "\"" + name + "\" of " + shape_text(shape), shape_text(source.entry->shape),
                   "it is of another model");
}

void StateLoading::match(LoadReport& report) const {
  match_weights(report);
  if (optimizer_ == nullptr) return;
  match_optimizer();
  const auto in_state = [this](const std::string& name) { return name_in_state(name); };
  if (options_.optimizer_options) {
    groups_->check(*optimizer_, model_->parameters(), in_state);
  } else {
    groups_->tell_others(*optimizer_, model_->parameters(), in_state, report.notes);
  }
  match_states(report);
  match_average(report);
}

void StateLoading::match_weights(LoadReport& report) const {
  std::set<std::string> left;
  for (const state::TensorEntry& entry : saved_.weights().header().tensors) left.insert(entry.name);
  const auto match_one = [&](const std::vector<std::string>& names,
                             const std::vector<int64_t>& whole_sizes) {
    const Source source = weight(names);
    if (!source) {
      report.missing.push_back(names.front());
      return;
    }
    check_shape(source, names.front(), whole_sizes);
    left.erase(source.entry->name);
    // Tied here, and of their own there.
    for (const std::string& name : names) left.erase(name_in_state(name));
  };
  for (const zero::PlacedParameter& placed : model_->parameters()) {
    match_one(placed.parameter.names, placed.parameter.whole_sizes());
  }
  for (const zero::NamedParameter& buffer : model_->buffers()) {
    match_one(buffer.names, buffer.tensor.sizes().vec());
  }
  // What other stages have is no surprise here.
  if (zero::pipeline_world_of(pages_) != nullptr) {
    for (const auto& of_model : {pages_.part()->parameters, pages_.part()->buffers}) {
      for (const TensorOfModel& of : of_model) match_one(of.names, of.sizes);
    }
  }
  report.unexpected.insert(report.unexpected.end(), left.begin(), left.end());
}

void StateLoading::match_optimizer() const {
  const json& content = saved_.manifest().content;
  const std::string file = saved_.directory().string();
  if (saved_.optimizer() == nullptr || !content.contains("optimizer")) {
    throw StateError(file, 0,
                     "expected the state of an optimizer, got weights alone; use load_weights()");
  }
  const std::string name = content["optimizer"].at("class");
  if (options_.strict && name != optimizer_->class_name()) {
    throw StateError(
        file, 0,
        "expected the state of " + optimizer_->class_name() + ", got that of " + name +
            "; use load_weights(), or LoadOptions::strict = false for what they share");
  }
  const size_t groups = content["optimizer"].at("groups").size();
  if (options_.strict && groups != optimizer_->param_groups().size()) {
    throw StateError(file, 0,
                     "expected " + std::to_string(optimizer_->param_groups().size()) +
                         " parameter groups, got " + std::to_string(groups) +
                         "; make the optimizer with as many, or load with LoadOptions::strict = "
                         "false, which keeps its options");
  }
}

void StateLoading::match_states(LoadReport& report) const {
  const zero::ShardedUpdates& updates = updates_of(*optimizer_);
  updates_of(*optimizer_)
      .visit_states(zero::StateAccess::kDescribe, [&](size_t page, zero::OwnedState& owned) {
        if (!updates.updates_page(page)) return;
        const zero::NamedParameter& named = model_->parameters()[owned.parameter].parameter;
        if (!knows_states_of(named.name())) {
          report.missing.push_back(state_name(named.name(), kStepState));
          return;
        }
        std::set<std::string> left;
        const auto known = states_.find(name_in_state(named.name()));
        if (known != states_.end()) left.insert(known->second.begin(), known->second.end());
        if (left.contains(kStepState)) {
          for (const zero::OwnedState::Tensor& tensor : owned.tensors) {
            const Source source = optimizer_state(named.name(), tensor.name);
            if (!source) report.missing.push_back(state_name(named.name(), tensor.name));
            if (source)
              check_shape(source, state_name(named.name(), tensor.name), named.whole_sizes());
            left.erase(tensor.name);
          }
          for (const zero::OwnedState::Tensor& tensor : owned.whole_tensors) {
            const std::string state = state_name(named.name(), tensor.name);
            const Source source = optimizer_state(named.name(), tensor.name);
            if (!source) report.missing.push_back(state);
            if (source) check_shape(source, state, tensor.values.sizes().vec());
            left.erase(tensor.name);
          }
        }
        left.erase(kStepState);
        left.erase(kMasterState);
        left.erase(kAverageState);
        if (owned.takes_others) return;
        for (const std::string& state : left) {
          report.unexpected.push_back(state_name(name_in_state(named.name()), state));
        }
      });
}

void StateLoading::match_average(LoadReport& report) const {
  for (const zero::PlacedParameter& placed : model_->parameters()) {
    const std::string& name = placed.parameter.name();
    const Source source = optimizer_state(name, kAverageState);
    if (average_ == nullptr && source) {
      report.unexpected.push_back(state_name(name_in_state(name), kAverageState));
    } else if (average_ != nullptr && !source) {
      report.missing.push_back(state_name(name, kAverageState));
    } else if (source) {
      check_shape(source, state_name(name, kAverageState), placed.parameter.whole_sizes());
    }
  }
}

void StateLoading::read(const Source& source, int64_t first, const at::Tensor& to) {
  const auto size = static_cast<uint64_t>(state::size_of(source.entry->dtype));
  const std::string state =
      source.file == saved_.optimizer() ? parts_of(source.entry->name).second : std::string();
  state::BlockReader& reader =
      readers_.try_emplace(Stream(source.file, state), *source.file).first->second;
  read_as(scalar_type(source.entry->dtype), first, to, [&](int64_t at, const at::Tensor& piece) {
    const uint64_t begin = source.entry->begin + static_cast<uint64_t>(at) * size;
    reader.read(begin, begin + static_cast<uint64_t>(piece.numel()) * size,
                static_cast<char*>(piece.mutable_data_ptr()));
  });
}

void StateLoading::load_weights() {
  const at::NoGradGuard no_grad;
  for (size_t page = 0; page < pages_.layouts().size(); ++page) load_page(page);
  for (const zero::NamedParameter& buffer : model_->buffers()) {
    const Source source = weight(buffer);
    if (!source || buffer.tensor.numel() == 0) continue;
    const at::Tensor flat = at::empty({buffer.tensor.numel()}, scalar_type(source.entry->dtype));
    read(source, 0, flat);
    memory::write_values(buffer.tensor, flat.view(buffer.tensor.sizes()),
                         "buffer \"" + buffer.names.front() + "\"");
  }
}

void StateLoading::load_page(size_t page) {
  masters_.visit_owned(page, zero::TierStorage::Use::kWrite, [&](const auto& owned) {
    for (const size_t index : model_->parameters().of_page(page)) {
      load_parameter(model_->parameters()[index], owned);
    }
  });
}

void StateLoading::load_parameter(const zero::PlacedParameter& placed,
                                  const zero::MasterWeights::Owned& owned) {
  const Source raw = weight(placed.parameter);
  if (!raw) return;
  const Source most_exact = exact(placed.parameter);
  const auto reader = [this](const Source& source) -> ReadElements {
    return [this, source](int64_t first, const at::Tensor& to) { read(source, first, to); };
  };
  fill_owned(pages_, placed, owned,
             {.dtype = scalar_type(raw.entry->dtype),
              .rounded = reader(raw),
              .exact = reader(most_exact)});
}

void StateLoading::load_optimizer() {
  const at::NoGradGuard no_grad;
  if (options_.optimizer_options) {
    groups_->load(*optimizer_, model_->parameters(),
                  [this](const auto& name) { return name_in_state(name); });
  }
  updates_of(*optimizer_)
      .visit_states(zero::StateAccess::kWrite,
                    [&](size_t page, zero::OwnedState& owned) { load_shard(page, owned); });
  load_frozen();
  updates_of(*optimizer_).set_steps(saved_.manifest().content["optimizer"].at("updates"));
}

// Pages that do not train have no update that could take states. What a file has of them waits until they do.
void StateLoading::load_frozen() {
  zero::ShardedUpdates& updates = updates_of(*optimizer_);
  std::map<size_t, std::vector<zero::OwnedState>> by_page;
  for (size_t group = 0; group < optimizer_->param_groups().size(); ++group) {
    for (const size_t index : updates.parameters_of_group(group)) {
      const zero::PlacedParameter& placed = model_->parameters()[index];
      const Range owned = pages_.owned(placed.page);
      const Range range = intersection(owned, placed.range);
      if (updates.updates_page(placed.page) || range.empty()) continue;
      if (!optimizer_state(placed.parameter.name(), kStepState)) continue;
      zero::OwnedState state{.parameter = index,
                             .range = {range.begin - owned.begin, range.end - owned.begin},
                             .takes_others = true};
      load_shard(placed.page, state);
      by_page[placed.page].push_back(std::move(state));
    }
  }
  updates.keep_frozen_states(std::move(by_page));
}

void StateLoading::load_average() {
  for (const zero::PlacedParameter& placed : model_->parameters()) {
    const Source source = optimizer_state(placed.parameter.name(), kAverageState);
    if (!source) continue;
    const at::Tensor& average = pages_of(*average_).average(placed.page);
    const Range own = pages_.owned(placed.page);
    for_each_run(placed, own, [&](const ElementRun& run) {
      read(source, run.in_whole, average.narrow(0, run.in_page - own.begin, run.numel));
    });
  }
}

void StateLoading::load_shard(size_t page, zero::OwnedState& owned) {
  const zero::PlacedParameter& placed = model_->parameters()[owned.parameter];
  const std::string& name = placed.parameter.name();
  if (!knows_states_of(name)) return;
  const Source steps = optimizer_state(name, kStepState);
  owned.steps = 0;
  if (steps) {
    const at::Tensor count = at::zeros({1}, at::kLong);
    read(steps, 0, count);
    owned.steps = count.item<int64_t>();
  }
  if (owned.takes_others && steps) {
    owned.tensors.clear();
    for (const std::string& state : states_.at(name_in_state(name))) {
      if (state == kStepState || state == kMasterState || state == kAverageState) continue;
      const state::TensorEntry& entry = *optimizer_state(name, state).entry;
      const auto options =
          at::TensorOptions(model_->world().device()).dtype(scalar_type(entry.dtype));
      if (entry.shape == shape_of(placed.parameter.whole_sizes())) {
        owned.tensors.push_back({state, at::empty({owned.range.numel()}, options)});
      } else {
        const std::vector<int64_t> sizes(entry.shape.begin(), entry.shape.end());
        owned.whole_tensors.push_back({state, at::empty(sizes, options)});
      }
    }
  }
  for (const zero::OwnedState::Tensor& tensor : owned.whole_tensors) {
    const Source source = optimizer_state(name, tensor.name);
    if (source) {
      read(source, 0, tensor.values.view(-1));
    } else {
      at::Tensor(tensor.values).zero_();
    }
  }
  const int64_t first = pages_.owned(page).begin + owned.range.begin;
  for (const zero::OwnedState::Tensor& tensor : owned.tensors) {
    const Source source = optimizer_state(name, tensor.name);
    if (!source) {
      at::Tensor(tensor.values).zero_();
      continue;
    }
    for_each_run(placed, {first, first + owned.range.numel()}, [&](const ElementRun& run) {
      read(source, run.in_whole, tensor.values.narrow(0, run.in_page - first, run.numel));
    });
  }
}

}  // namespace zeropage::saving
