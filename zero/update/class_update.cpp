#include "zero/update/class_update.h"

#include <algorithm>
#include <limits>
#include <typeinfo>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/Type.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include "memory/charged_block.h"
#include "optim/adopt_copy.h"
#include "zero/update/archive_values.h"
#include "zeropage/check.h"
#include "zeropage/options.h"

namespace zeropage::zero {
namespace {

using torch::optim::OptimizerParamGroup;

// Values, gradient, two states and two temporaries of that many fp32 elements fit a second-level
// cache of 2 MiB, and a state of them is a whole number of pages with the allocator's header.
constexpr int64_t kTileNumelPerThread = 65536 - 16;

int64_t longest_tile(const at::Tensor& values) {
  return values.is_cpu() ? kTileNumelPerThread * at::get_num_threads()
                         : std::numeric_limits<int64_t>::max();
}

constexpr const char* kStep = "step";

// LibTorch's name of a parameter in an archive.
std::string key_of(const at::Tensor& values) {
  return std::to_string(reinterpret_cast<size_t>(values.unsafeGetTensorImpl()));
}

// In place, unless the gradient is of a lower precision than the product.
at::Tensor multiplied(const at::Tensor& gradient, double factor) {
  if (factor == 1) return gradient;
  return is_low_precision(gradient.scalar_type()) ? gradient.to(at::kFloat).mul_(factor)
                                                  : gradient.mul_(factor);
}

}  // namespace

void ClassUpdate::add_groups(std::vector<OwnedGroup> groups) {
  // Some classes (Adagrad) make their state at once, and only for the groups they are made with.
  const memory::SurvivorScope state(memory::Kind::kOptimizerState);
  std::vector<OptimizerParamGroup> mirrors;
  for (OwnedGroup& group : groups) mirrors.push_back(mirror(std::move(group)));
  if (!optimizer_) {
    optimizer_ = make_class_optimizer_(std::move(mirrors));
  } else {
    for (const OptimizerParamGroup& added : mirrors) optimizer_->add_param_group(added);
  }
}

// The group as the class sees it: tiles instead of parameters.
OptimizerParamGroup ClassUpdate::mirror(OwnedGroup group) {
  const int64_t longest = longest_tile(part_.values);
  std::vector<at::Tensor> values;
  for (const ParameterShard& shard : group.shards) {
    for (int64_t begin = shard.range.begin; begin < shard.range.end;) {
      const int64_t numel = std::min(longest, shard.range.end - begin);
      const auto of = [&](const at::Tensor& flat) {
        return flat.defined() ? flat.narrow(0, begin, numel) : flat;
      };
      tiles_.push_back(
          {shard.parameter, {begin, begin + numel}, of(part_.values), of(part_.copy_out)});
      values.push_back(tiles_.back().values);
      begin += numel;
    }
  }
  return {std::move(values), std::move(group.options)};
}

void ClassUpdate::set_options(size_t group, const torch::optim::OptimizerOptions& options) {
  optimizer_->param_groups()[group].set_options(options.clone());
}

void ClassUpdate::step(const at::Tensor& gradient, const HasGradient& has_gradient,
                       const optim::GradientFactors& factors, const Directions& /*directions*/) {
  TORCH_INTERNAL_ASSERT(!factors.found_inf.defined(), "a class reads no flag");
  ++steps_;
  if (tiles_.empty()) return;
  // The first step makes the state; later ones only temporaries.
  const memory::SurvivorScope state(memory::Kind::kOptimizerState);
  for (Tile& tile : tiles_) {
    if (!has_gradient(tile.parameter)) continue;
    if (part_.adopts_copy) optim::adopt_copy(tile.values, tile.copy_out);
    const at::Tensor of_tile = gradient.narrow(0, tile.range.begin, tile.range.numel());
    tile.values.mutable_grad() = multiplied(of_tile, factors.scale).to(tile.values.scalar_type());
  }
  optimizer_->step();
  for (Tile& tile : tiles_) {
    if (tile.values.grad().defined() && tile.copy_out.defined()) {
      tile.copy_out.copy_(tile.values);
    }
    tile.values.mutable_grad().reset();
  }
}

// Without tensors where the class has made none.
OwnedState ClassUpdate::saved_state(const Tile& tile) const {
  OwnedState state{.parameter = tile.parameter, .range = tile.range, .takes_others = true};
  const auto found = optimizer_->state().find(tile.values.unsafeGetTensorImpl());
  if (found == optimizer_->state().end()) return state;
  state.steps = std::max<int64_t>(steps_, 1);
  const auto& class_state = *found->second;
  for (auto& [name, value] : saved_values([&](auto& to) { class_state.serialize(to); })) {
    if (name == kStep && value.isInt()) {
      state.steps = value.toInt();
    } else if (value.isTensor() && value.toTensor().defined()) {
      ZP_CHECK(value.toTensor().numel() == tile.range.numel(), "state \"", name, "\" of ",
               c10::demangle(typeid(*optimizer_).name()), " has ", value.toTensor().numel(),
               " elements for ", tile.range.numel(),
               " of the parameter; only states of one element each can be kept");
      state.tensors.push_back({name, value.toTensor().reshape({-1})});
    } else {
      ZP_CHECK(value.isNone() || value.isTensor(), "state \"", name, "\" of ",
               c10::demangle(typeid(*optimizer_).name()), ", a ", value.tagKind(),
               ": only tensors and \"step\" can be kept");
    }
  }
  return state;
}

void ClassUpdate::visit_states(StateAccess access, const VisitState& visit) {
  std::vector<OwnedState> states;
  for (const Tile& tile : tiles_) {
    OwnedState state = saved_state(tile);
    visit(state);
    if (access == StateAccess::kWrite) states.push_back(std::move(state));
  }
  if (!states.empty()) load_states(states);
}

void ClassUpdate::visit_memory(const VisitMemory& visit) {
  if (!optimizer_) return;
  for (const auto& entry : optimizer_->state()) {
    const auto& state = *entry.second;
    for (const at::Tensor& of : tensors_in_place([&](auto& to) { state.serialize(to); })) {
      visit(of, memory::Kind::kOptimizerState);
    }
  }
}

// The form in which A::save() writes a group.
void ClassUpdate::write_group(torch::serialize::OutputArchive& archive, size_t group) const {
  const OptimizerParamGroup& of_group = optimizer_->param_groups()[group];
  archive.write("params/size", torch::tensor(static_cast<int64_t>(of_group.params().size())));
  for (size_t index = 0; index < of_group.params().size(); ++index) {
    archive.write(c10::str("params/", index), c10::IValue(key_of(of_group.params()[index])));
  }
  torch::serialize::OutputArchive options(archive.compilation_unit());
  of_group.options().serialize(options);
  archive.write("options", options);
}

// The class alone knows how to make its states, from an archive like the one it saves.
void ClassUpdate::load_states(const std::vector<OwnedState>& states) {
  const memory::SurvivorScope survivors(memory::Kind::kOptimizerState);
  const auto fill = [&](torch::serialize::OutputArchive& archive) {
    archive.write("pytorch_version", c10::IValue("1.5.0"));
    torch::serialize::OutputArchive all(archive.compilation_unit());
    for (size_t index = 0; index < states.size(); ++index) {
      if (states[index].tensors.empty() && states[index].steps == 0) continue;
      torch::serialize::OutputArchive one(archive.compilation_unit());
      one.write(kStep, c10::IValue(states[index].steps));
      for (const auto& [name, values] : states[index].tensors) {
        ZP_CHECK(values.numel() == tiles_[index].range.numel(), "loading state \"", name, "\" of ",
                 c10::demangle(typeid(*optimizer_).name()), ": expected ",
                 tiles_[index].range.numel(), " elements, as many as the parameter has here, got ",
                 values.numel(), "; load a state of this model");
        one.write(name, c10::IValue(values));
      }
      all.write(key_of(tiles_[index].values), one);
    }
    archive.write("state", all);
    torch::serialize::OutputArchive groups(archive.compilation_unit());
    const size_t count = optimizer_->param_groups().size();
    groups.write("param_groups/size", torch::tensor(static_cast<int64_t>(count)));
    for (size_t group = 0; group < count; ++group) {
      torch::serialize::OutputArchive of_group(archive.compilation_unit());
      write_group(of_group, group);
      groups.write(c10::str("param_groups/", group), of_group);
    }
    archive.write("param_groups", groups);
  };
  for (size_t index = 0; index < states.size(); ++index) {
    if (!states[index].tensors.empty() || states[index].steps > 0) continue;
    optimizer_->state().erase(tiles_[index].values.unsafeGetTensorImpl());
  }
  load_filled(fill, [&](auto& archive) { optimizer_->load(archive); });
  for (size_t index = 0; index < states.size(); ++index) {
    const bool has_state =
        optimizer_->state().count(tiles_[index].values.unsafeGetTensorImpl()) > 0;
    ZP_CHECK(has_state || states[index].tensors.empty(), c10::demangle(typeid(*optimizer_).name()),
             "::load() does not take back what its states save; write it as torch::optim's do");
  }
}

}  // namespace zeropage::zero
