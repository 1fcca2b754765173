#include "zero/layout/module_parameters.h"

#include <unordered_map>
#include <unordered_set>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "parallel/slice_mark.h"
#include "zeropage/check.h"
#include "zeropage/detail/model_part.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::zero {
namespace {

// The slice that the tensor's mark names.
std::optional<ParameterSlice> slice_by_mark(const at::Tensor& tensor) {
  const auto* mark = dynamic_cast<const parallel::SliceMark*>(operators::mark_of(tensor));
  if (mark == nullptr) return std::nullopt;
  return ParameterSlice{mark->ranks(), mark->cut(), mark->same_slices()};
}

class Walk {
 public:
  void visit(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      add(prefix + parameter.key(), parameter.value());
    }
    if (const auto* layer = dynamic_cast<const parallel::SlicedLayer*>(&module))
      note_slices(*layer);
    const bool children_are_units = dynamic_cast<const torch::nn::ModuleListImpl*>(&module) ||
                                    dynamic_cast<const torch::nn::SequentialImpl*>(&module);
    for (const auto& child : module.named_children()) {
      if (children_are_units) ++unit_;
      visit(*child.value(), prefix + child.key() + ".");
      if (children_are_units) ++unit_;
    }
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto [at, is_new] = known_.try_emplace(tensor.unsafeGetTensorImpl(), found_.size());
    if (is_new) {
      found_.push_back({{name}, tensor, unit_, tensor.scalar_type(), slice_by_mark(tensor)});
    } else {
      found_[at->second].names.push_back(name);
    }
  }

  std::vector<NamedParameter> take() { return std::move(found_); }

 private:
  void note_slices(const parallel::SlicedLayer& layer) {
    for (const auto& [slice, cut] : layer.sliced_parameters()) {
      const auto at = known_.find(slice.unsafeGetTensorImpl());
      if (at != known_.end())
        found_[at->second].slice =
            ParameterSlice{layer.ranks_of_slices(), cut, layer.ranks_of_same_slices()};
    }
  }

  std::vector<NamedParameter> found_;
  std::unordered_map<const at::TensorImpl*, size_t> known_;
  int unit_ = 0;
};

// A stage may know a tied weight by one of its names alone.
void name_as_in_model(const ModelPart& part, NamedParameter& parameter) {
  const auto known = part.own.find(parameter.tensor.unsafeGetTensorImpl());
  ZP_CHECK(known != part.own.end(), "parameter \"", parameter.name(),
           "\" was registered or replaced after the stage was made; change the model's "
           "constructor, which pipeline_stage() calls");
  const TensorOfModel& in_model = part.parameters[known->second];
  parameter.names = in_model.names;
  parameter.is_tied = in_model.copy_on.has_value();
  parameter.counts_elsewhere = parameter.is_tied && in_model.rank != part.ranks.rank();
}

// Storages of the parameters that selected modules register themselves. A tied one is one storage, which stays
// fp32 for both.
std::unordered_set<const c10::StorageImpl*> storages_of(const torch::nn::Module& module,
                                                        const ModuleSelection& selection) {
  std::unordered_set<const c10::StorageImpl*> storages;
  const std::function<void(const torch::nn::Module&, const std::string&)> visit =
      [&](const torch::nn::Module& at, const std::string& name) {
        if (selection.contains(name, at)) {
          for (const auto& parameter : at.parameters(/*recurse=*/false)) {
            storages.insert(parameter.storage().unsafeGetStorageImpl());
          }
        }
        for (const auto& child : at.named_children()) {
          visit(*child.value(), name.empty() ? child.key() : name + "." + child.key());
        }
      };
  visit(module, "");
  return storages;
}

void check_one_world(const NamedParameter& first, const ParameterSlice& of_first,
                     const NamedParameter& other, const ParameterSlice& of_other) {
  ZP_CHECK(&of_first.ranks.communicator() == &of_other.ranks.communicator(), "parameters \"",
           first.name(), "\" and \"", other.name(),
           "\" are slices over two worlds, and norms are over one; give all layers and plans of a "
           "module the same World");
}

}  // namespace

std::vector<int64_t> NamedParameter::whole_sizes() const {
  return slice ? slice->cut.whole_sizes(tensor.sizes()) : tensor.sizes().vec();
}

std::string describe(const NamedParameter& parameter) {
  std::string names;
  for (const std::string& name : parameter.names) names += (names.empty() ? "" : " = ") + name;
  const bool is_cast = parameter.dtype != parameter.tensor.scalar_type();
  return c10::str("parameter \"", names, "\": ", parameter.tensor.scalar_type(),
                  is_cast ? c10::str(" to ", parameter.dtype) : "", " ", parameter.tensor.sizes(),
                  parameter.slice ? c10::str(" of ", parameter.slice->ranks.size(), " slices") : "",
                  parameter.tensor.requires_grad() ? "" : " frozen");
}

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module) {
  Walk walk;
  walk.visit(module, "");
  std::vector<NamedParameter> parameters = walk.take();
  if (const auto part = model_part_of(module)) {
    for (NamedParameter& parameter : parameters) name_as_in_model(*part, parameter);
  }
  return parameters;
}

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module, const Options& options) {
  auto parameters = parameters_of(module);
  if (!options.compute_dtype) return parameters;
  const auto staying = storages_of(module, options.stays_fp32);
  for (NamedParameter& parameter : parameters) {
    const c10::ScalarType dtype = parameter.tensor.scalar_type();
    if (dtype == c10::kFloat) {
      const auto* storage = parameter.tensor.storage().unsafeGetStorageImpl();
      if (!staying.contains(storage)) parameter.dtype = *options.compute_dtype;
      continue;
    }
    ZP_CHECK(!parameter.tensor.requires_grad() || dtype == *options.compute_dtype, "parameter \"",
             parameter.name(), "\" trains in ", dtype, ", but options.compute_dtype is ",
             *options.compute_dtype,
             ": expected an fp32 module, whose values master weights begin with; wrap it before "
             "casting, or leave compute_dtype unset");
  }
  return parameters;
}

std::optional<comm::World> tensor_world_of(const std::vector<NamedParameter>& parameters) {
  const NamedParameter* first = nullptr;
  for (const NamedParameter& parameter : parameters) {
    if (!parameter.slice || parameter.is_of_experts()) continue;
    if (first == nullptr) first = &parameter;
    check_one_world(*first, *first->slice, parameter, *parameter.slice);
  }
  if (first == nullptr) return std::nullopt;
  return first->slice->ranks;
}

const ParameterSlice* cut_of_experts(const std::vector<NamedParameter>& parameters) {
  const NamedParameter* first = nullptr;
  for (const NamedParameter& parameter : parameters) {
    if (!parameter.is_of_experts()) continue;
    if (first == nullptr) first = &parameter;
    check_one_world(*first, *first->slice, parameter, *parameter.slice);
    ZP_CHECK(parallel::slice_mark_of(parameter.tensor) != nullptr, "parameter \"", parameter.name(),
             "\" was converted after expert_parallel() cut it, and norms would be of this rank's "
             "experts alone; call ->to() before expert_parallel()");
  }
  if (first == nullptr) return nullptr;
  for (const NamedParameter& parameter : parameters) {
    ZP_CHECK(
        !parameter.slice || parameter.is_of_experts(), "parameter \"", parameter.name(),
        "\" is a slice over a tensor axis, and \"", first->name(),
        "\" one of experts: a model may be cut in one of both ways; leave tensor_parallel() or "
        "expert_parallel() out");
  }
  return &*first->slice;
}

std::vector<NamedParameter> parameters_of(const std::vector<at::Tensor>& tensors) {
  Walk walk;
  for (size_t index = 0; index < tensors.size(); ++index) {
    walk.add("parameter " + std::to_string(index), tensors[index]);
  }
  return walk.take();
}

}  // namespace zeropage::zero
