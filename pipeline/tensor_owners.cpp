#include "pipeline/tensor_owners.h"

#include <functional>
#include <unordered_set>

#include "zeropage/check.h"
#include "zeropage/detail/slices.h"

namespace zeropage::pipeline {
namespace {

using torch::nn::Module;

// Layers that list a module, each with its rank.
struct ListedBy {
  const PipelineLayer* layer;
  int rank;
};
using ListedModules = std::unordered_map<const Module*, std::vector<ListedBy>>;

std::string name_in(const Module& whole, const Module& module) {
  for (const auto& item : whole.named_modules()) {
    if (item.value().get() == &module) return item.key();
  }
  return "";
}

// Whether one leads from the model to a module past another one.
bool leads_past(const Module& whole, const Module& avoided, const Module& to) {
  std::unordered_set<const Module*> seen;
  const std::function<bool(const Module&)> visit = [&](const Module& at) {
    if (&at == &to) return true;
    if (&at == &avoided || !seen.insert(&at).second) return false;
    for (const auto& child : at.children()) {
      if (visit(*child)) return true;
    }
    return false;
  };
  return visit(whole);
}

// Would give the rank all that another one's layers have. A module of two that both lead to it is shared by intention:
// a head that has the embedding.
void check_holds_no_others(const Module& whole, const ListedModules& listed) {
  for (const auto& [module, by] : listed) {
    for (const auto& below : module->modules(/*include_self=*/false)) {
      const auto found = listed.find(below.get());
      if (found == listed.end() || leads_past(whole, *module, *below)) continue;
      for (const ListedBy& outer : by) {
        for (const ListedBy& inner : found->second) {
          if (outer.rank == inner.rank) continue;
          const std::string name = name_in(whole, *module);
          ZP_CHECK(
              false, "pipeline_stage: layer \"", outer.layer->name, "\" of rank ", outer.rank,
              " lists ", name.empty() ? "the model itself" : "module \"" + name + "\"",
              ", which holds module \"", name_in(whole, *below), "\" of layer \"",
              inner.layer->name, "\" on rank ", inner.rank,
              ": expected modules whose parameters all are the layer's; list the modules that "
              "it calls, and in PipelineLayer::tensors the parameters and buffers that it uses "
              "beside");
        }
      }
    }
  }
}

}  // namespace

TensorOwners::TensorOwners(const Module& whole, const PipelineLayers& layers,
                           const std::vector<int64_t>& first_layers, int ranks)
    : ranks_(ranks) {
  std::unordered_set<const at::TensorImpl*> parameters, of_model;
  for (const at::Tensor& tensor : whole.parameters()) {
    parameters.insert(tensor.unsafeGetTensorImpl());
  }
  of_model = parameters;
  for (const at::Tensor& tensor : whole.buffers()) of_model.insert(tensor.unsafeGetTensorImpl());
  ListedModules listed;
  for (int stage = 0; stage + 1 < static_cast<int>(first_layers.size()); ++stage) {
    bool has_parameter = false;
    const int rank = stage % ranks_;
    const auto add = [&](const PipelineLayer& layer, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      ZP_CHECK(
          of_model.contains(tensor.unsafeGetTensorImpl()), "pipeline_stage: layer \"", layer.name,
          "\" lists a tensor of sizes ", tensor.sizes(),
          ", by itself or in a module, that is no parameter or buffer of the model, so it would "
          "not train and no state would have it; register it, or its module, in the model");
      ranks_of_[tensor.unsafeGetTensorImpl()].insert(rank);
      has_parameter = has_parameter || parameters.contains(tensor.unsafeGetTensorImpl());
    };
    for (int64_t index = first_layers[static_cast<size_t>(stage)];
         index < first_layers[static_cast<size_t>(stage) + 1]; ++index) {
      const PipelineLayer& layer = layers[static_cast<size_t>(index)];
      for (const auto& module : layer.modules) {
        listed[module.get()].push_back({&layer, rank});
        for (const at::Tensor& tensor : module->parameters()) add(layer, tensor);
        for (const at::Tensor& tensor : module->buffers()) add(layer, tensor);
      }
      for (const at::Tensor& tensor : layer.tensors) add(layer, tensor);
    }
    ZP_CHECK(has_parameter, "pipeline_stage: stage ", stage, " of ", first_layers.size() - 1,
             " would have no parameter; give it a layer that has some "
             "(PipelineStageOptions::first_layers), or use fewer stages");
  }
  check_holds_no_others(whole, listed);
  check_counts_on_one_rank(whole);
}

void TensorOwners::check_counts_on_one_rank(const Module& whole) const {
  for (const auto& item : whole.named_modules()) {
    const auto* const layer = dynamic_cast<const parallel::SlicedLayer*>(item.value().get());
    if (layer == nullptr) continue;
    for (const at::Tensor& buffer : layer->buffers_by_own_tokens()) {
      const auto found = ranks_of_.find(buffer.unsafeGetTensorImpl());
      if (!buffer.defined() || found == ranks_of_.end() || found->second.size() == 1) continue;
      ZP_CHECK(false, "pipeline_stage: the Experts \"", item.key(),
               "\" have a balance_bias and are used by layers on ", found->second.size(),
               " ranks, ", *found->second.begin(), " to ", *found->second.rbegin(),
               ", each of which would move the bias by its own tokens: expected one rank; cut "
               "the model elsewhere, give each layer Experts of its own, or set "
               "ExpertsOptions::balance_bias_rate to 0 and use balance_loss");
    }
  }
}

std::vector<TensorOfModel> TensorOwners::list(
    const torch::OrderedDict<std::string, at::Tensor>& named, Kind kind,
    std::unordered_map<const at::TensorImpl*, size_t>& index) const {
  std::vector<TensorOfModel> list;
  for (const auto& item : named) {
    const at::Tensor& tensor = item.value();
    const auto [at, is_new] = index.try_emplace(tensor.unsafeGetTensorImpl(), list.size());
    if (!is_new) {
      list[at->second].names.push_back(item.key());
      continue;
    }
    TensorOfModel& of = list.emplace_back();
    of.names = {item.key()};
    of.sizes = tensor.sizes().vec();
    of.dtype = tensor.scalar_type();
    place(of, tensor, kind);
  }
  return list;
}

void TensorOwners::place(TensorOfModel& of, const at::Tensor& tensor, Kind kind) const {
  const char* const kind_name = kind == Kind::kParameter ? "parameter" : "buffer";
  const auto found = ranks_of_.find(tensor.unsafeGetTensorImpl());
  ZP_CHECK(found != ranks_of_.end(), "pipeline_stage: ", kind_name, " \"", of.name(),
           "\" is in no layer, so no stage would have it; add its module to "
           "PipelineLayer::modules of the layer that uses it, or, where the module holds other "
           "layers' too, the tensor to PipelineLayer::tensors");
  const std::set<int>& users = found->second;
  of.rank = *users.begin();
  if (users.size() == 1) return;
  if (kind == Kind::kBuffer) {
    of.is_on_several = true;
    return;
  }
  const bool of_both_ends = users.size() == 2 && of.rank == 0 && *users.rbegin() == ranks_ - 1;
  ZP_CHECK(of_both_ends, "pipeline_stage: parameter \"", of.name(), "\" is used by layers on ",
           users.size(), " ranks, ", *users.begin(), " to ", *users.rbegin(), " of ", ranks_,
           ": expected one rank, or the first and the last; cut the model elsewhere, or give each "
           "its own");
  of.copy_on = ranks_ - 1;
}

}  // namespace zeropage::pipeline
