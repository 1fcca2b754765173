#include "zeropage/distributed_data_parallel.h"

#include <algorithm>
#include <utility>

#include "parallel/context/split_attention.h"
#include "zero/setup/wrapped_module.h"
#include "zeropage/check.h"
#include "zeropage/detail/model_part.h"
#include "zeropage/detail/slices.h"
#include "zeropage/event_sink.h"

namespace zeropage {
namespace {

// The tensor axis that the mesh has; null where it has none of several ranks.
const comm::World* tensor_axis(const comm::Mesh& mesh) {
  return mesh.has("tensor") && mesh["tensor"].size() > 1 ? &mesh["tensor"] : nullptr;
}

// A stage of a pipeline may be in whole where another has slices. Collective over the stages.
bool any_stage_has_slices(const torch::nn::Module& module, bool has_slices) {
  const auto part = model_part_of(module);
  if (!part || part->ranks.size() == 1) return has_slices;
  // In a simulated world the other stages say nothing.
  return part->ranks.device().is_meta() || part->ranks.max(has_slices ? 1.0 : 0.0) > 0;
}

void check_slices(const comm::Mesh& mesh, const torch::nn::Module& module) {
  const comm::World* const axis = tensor_axis(mesh);
  const auto slices = zero::tensor_world_of(zero::parameters_of(module));
  const bool has_slices = slices && slices->size() > 1;
  ZP_CHECK(axis == nullptr || any_stage_has_slices(module, has_slices),
           "DistributedDataParallel: the mesh's axis \"tensor\" has ", axis ? axis->size() : 1,
           " ranks, but no parameter of the module is a slice; call tensor_parallel(module, "
           "mesh[\"tensor\"], plan) before wrapping, or leave the axis out");
  ZP_CHECK(!has_slices || (axis != nullptr && &slices->communicator() == &axis->communicator()),
           "DistributedDataParallel: the module's parameters are slices over ",
           has_slices ? slices->size() : 1,
           " ranks that are no axis \"tensor\" of the mesh; cut it over mesh[\"tensor\"]");
}

// The pipeline axis that the mesh has; null where it has none of several ranks.
const comm::World* pipeline_axis(const comm::Mesh& mesh) {
  return mesh.has("pipeline") && mesh["pipeline"].size() > 1 ? &mesh["pipeline"] : nullptr;
}

void check_stage(const comm::Mesh& mesh, const torch::nn::Module& module) {
  const comm::World* const axis = pipeline_axis(mesh);
  const auto part = model_part_of(module);
  const bool is_stage = part && part->ranks.size() > 1;
  ZP_CHECK(is_stage || axis == nullptr,
           "DistributedDataParallel: the mesh's axis \"pipeline\" has ", axis ? axis->size() : 1,
           " ranks, but the module is no stage of a pipeline; make it by pipeline_stage(construct, "
           "layers, mesh[\"pipeline\"]) (zeropage/pipeline.h), or leave the axis out");
  ZP_CHECK(!is_stage || (axis != nullptr && &part->ranks.communicator() == &axis->communicator()),
           "DistributedDataParallel: the module is a stage of a pipeline over ",
           is_stage ? part->ranks.size() : 1,
           " ranks that are no axis \"pipeline\" of the mesh; make it over mesh[\"pipeline\"]");
}

// Whether expert_parallel() has seen the module, which may have left its experts whole.
bool has_placed_experts(const torch::nn::Module& module) {
  const auto is_placed = [](const torch::nn::Module& of) {
    const auto* layer = dynamic_cast<const parallel::SlicedLayer*>(&of);
    return layer != nullptr && layer->ranks_of_same_slices();
  };
  const auto modules = module.modules(/*include_self=*/false);
  return is_placed(module) || std::any_of(modules.begin(), modules.end(),
                                          [&](const auto& of) { return is_placed(*of); });
}

void check_experts(const comm::Mesh& mesh, const torch::nn::Module& module) {
  const comm::World* const axis =
      mesh.has("expert") && mesh["expert"].size() > 1 ? &mesh["expert"] : nullptr;
  ZP_CHECK(axis == nullptr || has_placed_experts(module),
           "DistributedDataParallel: the mesh's axis \"expert\" has ", axis ? axis->size() : 1,
           " ranks, but the module's experts were not placed on them; call expert_parallel(module, "
           "mesh) (zeropage/expert_parallel.h) before wrapping, or leave the axis out");
  ZP_CHECK(
      axis == nullptr || !model_part_of(module),
      "DistributedDataParallel: the mesh has the axis \"expert\", and the module is a stage of a "
      "pipeline, which cannot have experts that are cut over ranks; leave one of both out");
  const std::vector<zero::NamedParameter> parameters = zero::parameters_of(module);
  const zero::ParameterSlice* const cut = zero::cut_of_experts(parameters);
  ZP_CHECK(
      cut == nullptr || (axis != nullptr && &cut->ranks.communicator() == &axis->communicator()),
      "DistributedDataParallel: the module's experts are cut over ", cut ? cut->ranks.size() : 1,
      " ranks that are no axis \"expert\" of the mesh; wrap it over the mesh that "
      "expert_parallel() got");
}

// axis: along which the ranks have different tokens of a sample; null where there is none.
void check_context(const torch::nn::Module& module, const comm::World* axis) {
  const std::string within = parallel::context::marked_within(module);
  ZP_CHECK(within.empty(), "DistributedDataParallel: context_parallel() marked module \"", within,
           "\" and not the module that is wrapped; mark that one");
  const auto attention = parallel::context::split_attention_of(module);
  if (attention == nullptr) return;
  ZP_CHECK(axis != nullptr && &attention->world().communicator() == &axis->communicator(),
           "DistributedDataParallel: context_parallel() marked the module over ",
           attention->world().size(),
           " ranks that are no axis \"context\" of the mesh; mark it over mesh[\"context\"]");
  ZP_CHECK(
      !model_part_of(module),
      "DistributedDataParallel: context_parallel() marked a stage of a pipeline, whose forwards "
      "no wrapper sees; call parallel::context_attention() in its layers, without the mark");
}

// The ranks whose gradients are averaged.
const comm::World& ranks_of_samples(const comm::Mesh& mesh) {
  std::string names;
  for (const comm::MeshAxis& axis : mesh.axes()) {
    names += (names.empty() ? "\"" : ", \"") + axis.name + "\"";
    ZP_CHECK(
        axis.size == 1 || axis.name == "data" || axis.name == "context" || axis.name == "expert" ||
            axis.name == "tensor" || axis.name == "pipeline",
        "DistributedDataParallel: the mesh's axis \"", axis.name, "\" has ", axis.size,
        " ranks: expected axes \"pipeline\", \"data\", \"context\", \"expert\" and \"tensor\"; "
        "wrap "
        "over a world, such as mesh[\"data\"], and do yourself what ranks along the other axes are "
        "for");
  }
  ZP_CHECK(
      mesh.has("data"), "DistributedDataParallel: the mesh has the axes ", names,
      ": expected one that is named \"data\", whose ranks get other samples; add {\"data\", 1} "
      "where there is none");
  return mesh.samples();
}

}  // namespace

DistributedDataParallelBase::DistributedDataParallelBase(
    const std::shared_ptr<torch::nn::Module>& module, comm::World world, const Options& options,
    const operators::ConstructionTape* tape)
    : base_(module) {
  check_context(*module, &world);
  wrapped_ = std::make_shared<zero::WrappedModule>(module, zero::RanksOfModel{world, world},
                                                   options, tape);
}

DistributedDataParallelBase::DistributedDataParallelBase(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const Options& options, const operators::ConstructionTape* tape)
    : base_(module) {
  const comm::World& data = ranks_of_samples(mesh);
  check_slices(mesh, *module);
  check_stage(mesh, *module);
  check_experts(mesh, *module);
  check_context(*module, mesh.has("context") ? &mesh["context"] : nullptr);
  zero::RanksOfModel ranks{data, mesh.world()};
  if (const comm::World* const tensor = tensor_axis(mesh)) ranks.tensor = *tensor;
  ranks.shares_samples = mesh.has("context") && mesh["context"].size() > 1;
  wrapped_ = std::make_shared<zero::WrappedModule>(module, std::move(ranks), options, tape);
}

const comm::World& DistributedDataParallelBase::world() const {
  return wrapped_->world();
}

const comm::World& DistributedDataParallelBase::all_ranks() const {
  return wrapped_->all_ranks();
}

const zero::ShardedModel& sharded_parameters_of(const DistributedDataParallelBase& model) {
  return model.wrapped_->sharded();
}

void DistributedDataParallelBase::before_forward(std::initializer_list<int64_t> samples) {
  const auto* const first =
      std::find_if(samples.begin(), samples.end(), [](int64_t count) { return count != 0; });
  wrapped_->before_forward(first == samples.end() ? 0 : *first);
}

void DistributedDataParallelBase::check_forward() const {
  wrapped_->check_forward();
}

std::shared_ptr<void> DistributedDataParallelBase::until_forward_ends() {
  return {nullptr, [wrapped = wrapped_.get()](void*) { wrapped->after_forward(); }};
}

memory::Kind DistributedDataParallelBase::kind_of_forward() {
  using memory::Kind;
  return memory::current_kind() == Kind::kRecompute ? Kind::kRecompute : Kind::kActivation;
}

std::shared_ptr<void> DistributedDataParallelBase::range_of_forward() {
  if (!memory::current_sink()) return nullptr;
  return std::make_shared<memory::SpanScope>(memory::Span::What::kRange, "forward");
}

torch::OrderedDict<std::string, at::Tensor> DistributedDataParallelBase::named_parameters() const {
  return base_->named_parameters();
}

torch::OrderedDict<std::string, at::Tensor> DistributedDataParallelBase::named_buffers() const {
  return base_->named_buffers();
}

NoSync DistributedDataParallelBase::no_sync() {
  return NoSync(wrapped_->sharded());
}

void DistributedDataParallelBase::park(memory::Tier tier, const std::string& nvme_directory) {
  wrapped_->parking().park(tier, nvme_directory);
}

void DistributedDataParallelBase::resume() {
  wrapped_->parking().resume();
}

bool DistributedDataParallelBase::is_parked() const {
  return wrapped_->parking().is_parked();
}

at::Tensor DistributedDataParallelBase::cast_input(const at::Tensor& tensor) const {
  const auto& dtype = wrapped_->options().compute_dtype;
  return dtype && tensor.defined() && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

void DistributedDataParallelBase::explain(c10::Error& error) const {
  const auto& dtype = wrapped_->options().compute_dtype;
  // "expected m1 and m2 to have the same dtype", "Input type (float) and bias type (c10::BFloat16)".
  if (!dtype || error.msg().find("type") == std::string::npos) return;
  std::string kept;
  for (const auto& buffer : base_->named_buffers()) {
    if (!buffer.value().is_floating_point() || buffer.value().scalar_type() == *dtype) continue;
    kept += c10::str(kept.empty() ? "buffers (" : ", ", '"', buffer.key(), "\" ",
                     buffer.value().scalar_type());
  }
  error.add_context(c10::str(
      "rank ", world().rank(), ": forward with options.compute_dtype ", *dtype,
      ": parameters and the floating-point inputs of forward() are ", *dtype, "; ",
      kept.empty() ? "" : kept + ") and ",
      "tensors that forward() makes itself keep their own dtype. If this error is about dtypes, "
      "cast "
      "those where they are used, as x + table.to(x.scalar_type()), or make them by x.options()"));
}

memory::PagingStatistics DistributedDataParallelBase::paging() const {
  const auto& pager = wrapped_->sharded().paging->pager();
  return pager ? pager->statistics() : memory::PagingStatistics();
}

}  // namespace zeropage
