#include "zero/pipeline/stage.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>

#include "memory/check.h"
#include "memory/storage.h"
#include "operators/construction_tape.h"

namespace zeropage {
namespace {

using torch::nn::Module;

// Where the stages begin, and where the last one ends.
std::vector<int64_t> first_layers_of(int64_t layers, int ranks,
                                     const PipelineStageOptions& options) {
  ZP_CHECK(options.chunks >= 1,
           "PipelineStageOptions::chunks: expected 1 or more stages a rank, got ", options.chunks);
  const int64_t stages = int64_t{ranks} * options.chunks;
  ZP_CHECK(layers >= stages, "pipeline_stage: expected at least a layer for each of ", stages,
           " stages, got ", layers, "; use fewer ranks or chunks, or list smaller layers");
  std::vector<int64_t> first = options.first_layers;
  if (first.empty()) {
    const int64_t each = layers / stages, longer = layers % stages;
    for (int64_t stage = 0; stage < stages; ++stage) {
      first.push_back(stage * each + std::min(stage, longer));
    }
  }
  ZP_CHECK(
      static_cast<int64_t>(first.size()) == stages && first.front() == 0 &&
          std::adjacent_find(first.begin(), first.end(), std::greater_equal<>()) == first.end() &&
          first.back() < layers,
      "PipelineStageOptions::first_layers: expected ", stages,
      " numbers that begin with 0, rise, and stay below ", layers, ", got ", at::IntArrayRef(first),
      "; give each stage its first layer");
  first.push_back(layers);
  return first;
}

// Which tensors of the model there are, and which ranks use each.
class Owners {
 public:
  Owners(const PipelineLayers& layers, const std::vector<int64_t>& first_layers, int ranks)
      : ranks_(ranks) {
    for (int stage = 0; stage + 1 < static_cast<int>(first_layers.size()); ++stage) {
      bool has_parameter = false;
      for (int64_t index = first_layers[static_cast<size_t>(stage)];
           index < first_layers[static_cast<size_t>(stage) + 1]; ++index) {
        const PipelineLayer& layer = layers[static_cast<size_t>(index)];
        for (const auto& module : layer.modules) {
          for (const at::Tensor& tensor : module->parameters()) add(tensor, stage % ranks_);
          for (const at::Tensor& tensor : module->buffers()) add(tensor, stage % ranks_);
          has_parameter = has_parameter || !module->parameters().empty();
        }
      }
      ZP_CHECK(has_parameter, "pipeline_stage: stage ", stage, " of ", first_layers.size() - 1,
               " would have no parameter; give it a layer that has some "
               "(PipelineStageOptions::first_layers), or use fewer stages");
    }
  }

  // Each tensor once, with all its names.
  std::vector<TensorOfModel> list(const torch::OrderedDict<std::string, at::Tensor>& named,
                                  const char* kind, bool may_be_tied,
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
      place(of, tensor, kind, may_be_tied);
    }
    return list;
  }

 private:
  void add(const at::Tensor& tensor, int rank) {
    ranks_of_[tensor.unsafeGetTensorImpl()].insert(rank);
  }

  void place(TensorOfModel& of, const at::Tensor& tensor, const char* kind,
             bool may_be_tied) const {
    const auto found = ranks_of_.find(tensor.unsafeGetTensorImpl());
    ZP_CHECK(found != ranks_of_.end(), "pipeline_stage: ", kind, " \"", of.name(),
             "\" is in no layer, so no stage would have it; add its module to "
             "PipelineLayer::modules of the layer that uses it");
    const std::set<int>& users = found->second;
    of.rank = *users.begin();
    if (users.size() == 1) return;
    const bool of_both_ends = users.size() == 2 && of.rank == 0 && *users.rbegin() == ranks_ - 1;
    ZP_CHECK(may_be_tied && of_both_ends, "pipeline_stage: ", kind, " \"", of.name(),
             "\" is used by layers on ", users.size(), " ranks, ", *users.begin(), " to ",
             *users.rbegin(), " of ", ranks_,
             ": expected one rank, or for a parameter the first and the last; cut the model "
             "elsewhere, or give each its own");
    of.copy_on = ranks_ - 1;
  }

  const int ranks_;
  std::unordered_map<const at::TensorImpl*, std::set<int>> ranks_of_;
};

// Registers those of the modules below `whole` in another module, each by its path.
bool register_own(const Module& whole, const std::unordered_set<const Module*>& own,
                  Module& part_of_model) {
  bool any = false;
  for (const auto& child : whole.named_children()) {
    if (own.contains(child.value().get())) {
      part_of_model.register_module(child.key(), child.value());
      any = true;
      continue;
    }
    // Pages end where elements of these end (zero/layout/module_parameters.cpp).
    const bool is_list = child.value()->as<torch::nn::ModuleListImpl>() != nullptr ||
                         child.value()->as<torch::nn::SequentialImpl>() != nullptr;
    const std::shared_ptr<Module> path =
        is_list ? std::make_shared<torch::nn::ModuleListImpl>() : std::make_shared<Module>();
    if (!register_own(*child.value(), own, *path)) continue;
    part_of_model.register_module(child.key(), path);
    any = true;
  }
  return any;
}

// Gives the stage's tensors their values; those of others are computed for the random numbers, and let go.
void fill(const Module& whole, const Module& part_of_model, const memory::ConstructionTape& tape) {
  std::vector<at::Tensor> targets, own;
  const auto collect = [&tape](const Module& module, std::vector<at::Tensor>& tensors) {
    for (const auto& of_module : {module.parameters(), module.buffers()}) {
      for (const at::Tensor& tensor : of_module) {
        if (tensor.defined() && tensor.is_meta() && tape.holds(tensor)) tensors.push_back(tensor);
      }
    }
  };
  collect(whole, targets);
  collect(part_of_model, own);
  std::unordered_map<const c10::StorageImpl*, std::vector<at::Tensor>> by_storage;
  for (const at::Tensor& tensor : own) {
    by_storage[tensor.storage().unsafeGetStorageImpl()].push_back(tensor);
  }
  tape.replay(targets, [&](const c10::StorageImpl& storage, const at::Tensor& values) {
    const auto known = by_storage.find(&storage);
    if (known == by_storage.end()) return;
    for (const at::Tensor& tensor : known->second) {
      memory::adopt_storage(tensor, values.storage(), values.scalar_type());
    }
  });
}

// The two ranks that have tied weights, and the first one's values for both.
std::optional<comm::World> join_ends(const comm::World& ranks) {
  const bool is_end = ranks.rank() == 0 || ranks.rank() == ranks.size() - 1;
  if (ranks.device().is_meta()) return is_end ? std::optional(ranks) : std::nullopt;
  comm::World ends = ranks.split(is_end ? 0 : 1 + ranks.rank(), ranks.rank());
  return is_end ? std::optional(std::move(ends)) : std::nullopt;
}

void take_values_of_first(const ModelPart& part, const Module& part_of_model) {
  if (!part.tied || part.tied->device().is_meta()) return;
  const at::NoGradGuard no_grad;
  for (at::Tensor& tensor : part_of_model.parameters()) {
    const auto known = part.own.find(tensor.unsafeGetTensorImpl());
    if (known == part.own.end() || !part.parameters[known->second].copy_on) continue;
    const at::Tensor values = tensor.contiguous().clone();
    part.tied->communicator()
        .broadcast(values.view({-1}), /*root=*/0,
                   "tied parameter \"" + part.parameters[known->second].name() + "\"")
        .wait();
    tensor.copy_(values);
  }
}

std::shared_ptr<ModelPart> make_part(const Module& whole, const PipelineLayers& layers,
                                     const std::vector<int64_t>& first_layers,
                                     const comm::World& ranks) {
  const Owners owners(layers, first_layers, ranks.size());
  std::unordered_map<const at::TensorImpl*, size_t> parameters, buffers;
  auto part = std::make_shared<ModelPart>(
      ModelPart{.ranks = ranks,
                .tied = {},
                .parameters = owners.list(whole.named_parameters(), "parameter", true, parameters),
                .buffers = owners.list(whole.named_buffers(), "buffer", false, buffers)});
  bool is_tied = false;
  for (const auto& [tensor, index] : parameters) {
    const TensorOfModel& of = part->parameters[index];
    is_tied = is_tied || of.copy_on;
    if (of.rank == ranks.rank() || of.copy_on == ranks.rank()) part->own.emplace(tensor, index);
  }
  // The layers too: one without parameters would else be run by two ranks, or by none.
  std::vector<std::string> lines = {
      c10::str("first layer of each stage, and the end: ", at::IntArrayRef(first_layers))};
  for (const TensorOfModel& of : part->parameters) {
    lines.push_back(c10::str("parameter \"", of.name(), "\" of stages on rank ", of.rank, ": ",
                             of.dtype, " ", at::IntArrayRef(of.sizes)));
  }
  ranks.check_agreement("the stages of the pipeline", lines);
  if (is_tied) part->tied = join_ends(ranks);
  return part;
}

}  // namespace

PipelineStage::PipelineStage(const Module& whole, PipelineLayers layers, const comm::World& ranks,
                             const PipelineStageOptions& options,
                             const memory::ConstructionTape* tape)
    : Module("PipelineStage"),
      chunks_(options.chunks),
      layers_(std::move(layers)),
      first_layers_(first_layers_of(static_cast<int64_t>(layers_.size()), ranks.size(), options)),
      part_(make_part(whole, layers_, first_layers_, ranks)) {
  std::unordered_set<const Module*> own;
  for (int chunk = 0; chunk < chunks_; ++chunk) {
    const auto stage = static_cast<size_t>(chunk * ranks.size() + ranks.rank());
    for (int64_t index = first_layers_[stage]; index < first_layers_[stage + 1]; ++index) {
      for (const auto& module : layers_[static_cast<size_t>(index)].modules) {
        own.insert(module.get());
      }
    }
  }
  register_own(whole, own, *this);
  if (ranks.device().is_meta()) return;
  if (tape != nullptr) fill(whole, *this, *tape);
  to(ranks.device());
  take_values_of_first(*part_, *this);
}

at::Tensor PipelineStage::forward(int chunk, const at::Tensor& input) {
  const auto stage = static_cast<size_t>(chunk * part_->ranks.size() + part_->ranks.rank());
  at::Tensor x = input;
  for (int64_t index = first_layers_[stage]; index < first_layers_[stage + 1]; ++index) {
    x = layers_[static_cast<size_t>(index)].forward(x);
  }
  return x;
}

}  // namespace zeropage
