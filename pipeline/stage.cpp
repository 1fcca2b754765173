#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>

#include "memory/storage.h"
#include "operators/construction_tape.h"
#include "pipeline/tensor_owners.h"
#include "zeropage/check.h"
#include "zeropage/pipeline.h"

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

// Stands, in a stage, for a module of the model that has modules of other stages too. The mode is that module's, which
// layers may ask.
template <typename Base>
class StandIn final : public Base {
 public:
  explicit StandIn(std::shared_ptr<Module> of) : of_(std::move(of)) {}
  void train(bool on) override {
    Base::train(on);
    of_->train(on);
  }
  bool is_training() const noexcept override { return of_->is_training(); }

 private:
  const std::shared_ptr<Module> of_;
};

std::shared_ptr<Module> stand_in_for(const std::shared_ptr<Module>& module) {
  // Pages end where elements of these end (zero/layout/module_parameters.cpp).
  const bool is_list = module->as<torch::nn::ModuleListImpl>() != nullptr ||
                       module->as<torch::nn::SequentialImpl>() != nullptr;
  if (is_list) return std::make_shared<StandIn<torch::nn::ModuleListImpl>>(module);
  return std::make_shared<StandIn<Module>>(module);
}

// What the layers of a rank list.
struct Listed {
  std::unordered_set<const Module*> modules;
  std::unordered_set<const at::TensorImpl*> tensors;

  void add(const PipelineLayer& layer) {
    for (const auto& module : layer.modules) modules.insert(module.get());
    for (const at::Tensor& tensor : layer.tensors) tensors.insert(tensor.unsafeGetTensorImpl());
  }
};

// Registers what is listed at or below `whole` in another module, each by its path.
bool register_own(const Module& whole, const Listed& own, Module& part_of_model) {
  bool any = false;
  const bool is_all_own = own.modules.contains(&whole);
  const auto is_own = [&](const at::Tensor& tensor) {
    return tensor.defined() && (is_all_own || own.tensors.contains(tensor.unsafeGetTensorImpl()));
  };
  for (const auto& item : whole.named_parameters(/*recurse=*/false)) {
    if (!is_own(item.value())) continue;
    part_of_model.register_parameter(item.key(), item.value(), item.value().requires_grad());
    any = true;
  }
  for (const auto& item : whole.named_buffers(/*recurse=*/false)) {
    if (!is_own(item.value())) continue;
    part_of_model.register_buffer(item.key(), item.value());
    any = true;
  }
  for (const auto& child : whole.named_children()) {
    if (is_all_own || own.modules.contains(child.value().get())) {
      part_of_model.register_module(child.key(), child.value());
      any = true;
      continue;
    }
    const std::shared_ptr<Module> path = stand_in_for(child.value());
    if (!register_own(*child.value(), own, *path)) continue;
    part_of_model.register_module(child.key(), path);
    any = true;
  }
  return any;
}

// Gives the stage's tensors their values; those of others are computed for the random numbers, and let go.
void fill(const Module& whole, const Module& part_of_model,
          const operators::ConstructionTape& tape) {
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
  // Each once, in the model's order: one end may list it by one of its names, the other by several.
  std::map<size_t, at::Tensor> tied;
  for (const at::Tensor& tensor : part_of_model.parameters()) {
    const auto known = part.own.find(tensor.unsafeGetTensorImpl());
    if (known == part.own.end() || !part.parameters[known->second].copy_on) continue;
    tied.emplace(known->second, tensor);
  }
  for (const auto& [index, tensor] : tied) {
    const at::Tensor values = tensor.contiguous().clone();
    part.tied->communicator()
        .broadcast(values.view({-1}), /*root=*/0,
                   "tied parameter \"" + part.parameters[index].name() + "\"")
        .wait();
    tensor.copy_(values);
  }
}

std::shared_ptr<ModelPart> make_part(const Module& whole, const PipelineLayers& layers,
                                     const std::vector<int64_t>& first_layers,
                                     const comm::World& ranks) {
  const pipeline::TensorOwners owners(whole, layers, first_layers, ranks.size());
  std::unordered_map<const at::TensorImpl*, size_t> parameters, buffers;
  auto part = std::make_shared<ModelPart>(ModelPart{
      .ranks = ranks,
      .tied = {},
      .parameters = owners.list(whole.named_parameters(), pipeline::TensorOwners::Kind::kParameter,
                                parameters),
      .buffers =
          owners.list(whole.named_buffers(), pipeline::TensorOwners::Kind::kBuffer, buffers)});
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

PipelineStage::PipelineStage(std::shared_ptr<torch::nn::Module> whole, PipelineLayers layers,
                             const comm::World& ranks, const PipelineStageOptions& options,
                             const operators::ConstructionTape* tape)
    : Module("PipelineStage"),
      whole_(std::move(whole)),
      chunks_(options.chunks),
      layers_(std::move(layers)),
      first_layers_(first_layers_of(static_cast<int64_t>(layers_.size()), ranks.size(), options)),
      part_(make_part(*whole_, layers_, first_layers_, ranks)) {
  Listed own;
  for (int chunk = 0; chunk < chunks_; ++chunk) {
    const int of_all = chunk * ranks.size() + ranks.rank();
    const auto stage = static_cast<size_t>(of_all);
    for (int64_t index = first_layers_[stage]; index < first_layers_[stage + 1]; ++index) {
      own.add(layers_[static_cast<size_t>(index)]);
    }
  }
  register_own(*whole_, own, *this);
  std::unordered_set<std::string> shared;
  for (const TensorOfModel& of : part_->buffers) {
    if (of.is_on_several) shared.insert(of.names.begin(), of.names.end());
  }
  for (const auto& item : named_buffers()) {
    if (shared.contains(item.key())) shared_buffers_.emplace_back(item.key(), item.value());
  }
  if (ranks.device().is_meta()) return;
  if (tape != nullptr) fill(*whole_, *this, *tape);
  to(ranks.device());
  take_values_of_first(*part_, *this);
}

void PipelineStage::train(bool on) {
  Module::train(on);
  // Last: the model's own train() may leave parts of it as they are.
  whole_->train(on);
}

at::Tensor PipelineStage::forward(int chunk, const at::Tensor& input) {
  const int of_all = chunk * part_->ranks.size() + part_->ranks.rank();
  const auto stage = static_cast<size_t>(of_all);
  std::vector<uint32_t> versions;
  for (const auto& [unused, buffer] : shared_buffers_) versions.push_back(buffer._version());
  at::Tensor x = input;
  for (int64_t index = first_layers_[stage]; index < first_layers_[stage + 1]; ++index) {
    x = layers_[static_cast<size_t>(index)].forward(x);
  }
  for (size_t index = 0; index < versions.size(); ++index) {
    const auto& [name, buffer] = shared_buffers_[index];
    ZP_CHECK(buffer._version() == versions[index], "buffer \"", name,
             "\" was written to by a layer, but layers of several ranks use it, and each rank has "
             "its own: expected that nobody writes it; give each layer a buffer of its own");
  }
  return x;
}

}  // namespace zeropage
