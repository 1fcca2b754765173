#include "zero/setup/sharded_model.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "zero/gradients/hooks.h"
#include "zero/setup/choose_gradients.h"
#include "zero/setup/memory_limits.h"
#include "zero/setup/memory_need.h"
#include "zero/setup/slow_precision.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace zeropage::zero {
namespace {

static_assert(Options::kTwoLargestPages == paging::PagerOptions::kTwoLargestPages);

// Whose parameters they are, beside the ranks that get other samples.
struct ModelOfParameters {
  std::shared_ptr<const ModelPart> part = nullptr;
  std::optional<comm::World> tensor = {};
};

MakePagesOptions pages_options(const Options& options, const comm::World& world,
                               ModelOfParameters model) {
  return {.pages = {.page_bytes = page_bytes_on(world.device(), options),
                    .sharding = options,
                    .page_offload = PageOffload::make(world, options),
                    .part = std::move(model.part),
                    .tensor_world = std::move(model.tensor)},
          .paging = {.what = "parameter",
                     .budget_bytes = options.parameter_budget_bytes,
                     .budget_option = "options.parameter_budget_bytes",
                     .prefetch_bytes = options.prefetch_bytes,
                     .retention = options.reshard == Reshard::kAfterUse
                                      ? paging::Retention::kUntilUnused
                                      : paging::Retention::kUntilReleased}};
}

void check_world_invariant(const comm::World& world, const Options& options) {
  if (!options.world_invariant) return;
  const auto ranks = static_cast<uint64_t>(world.size());
  ZP_CHECK(std::has_single_bit(ranks),
           "options.world_invariant: expected a power of two of ranks, ", "got ", ranks,
           ", whose tree is no part of the tree over micro-batches; use ", std::bit_floor(ranks),
           " or ", std::bit_ceil(ranks));
  ZP_CHECK(world.communicator().has_fixed_order(),
           "options.world_invariant: ", world.communicator().transport(),
           " adds in an order that depends on the number of ranks; make the world with "
           "WorldOptions::reduction_order = ReductionOrder::kFixed");
}

void check_not_wrapped(const NamedParameter& parameter) {
  ZP_CHECK(
      !has_accumulate_hooks(parameter.tensor), "parameter \"", parameter.name(),
      "\" is wrapped already: its memory lies in the pages of another DistributedDataParallel or "
      "Optimizer; use that one, or let it and its optimizers go first");
}

void check_can_be_split(const NamedParameter& parameter, const Options& options) {
  ZP_CHECK(options.low_precision_update != LowPrecisionUpdate::kSplitMasterWeights ||
               !parameter.tensor.requires_grad() || parameter.dtype != at::kHalf,
           "options.low_precision_update: LowPrecisionUpdate::kSplitMasterWeights is for bfloat16, "
           "but parameter \"",
           parameter.name(), "\" is half; use LowPrecisionUpdate::kMasterWeights");
}

void check_accumulates(const NamedParameter& parameter, const Options& options) {
  if (!parameter.tensor.requires_grad() || !is_low_precision(parameter.dtype)) return;
  const c10::ScalarType asked = options.accumulate_dtype.value_or(c10::kFloat);
  ZP_CHECK(asked == c10::kFloat || asked == parameter.dtype,
           "options.accumulate_dtype: expected float or the dtype of parameter \"",
           parameter.name(), "\", ", parameter.dtype, ", got ", asked);
}

// The ranks that have the other slices decide over all gradients together, so they have the same
// parameters, though not of the same sizes.
void check_agreement_over_slices(const std::optional<comm::World>& world,
                                 const std::vector<NamedParameter>& parameters,
                                 const Options& options) {
  if (!world || world->size() == 1) return;
  std::vector<std::string> lines = describe(options);
  for (const NamedParameter& parameter : parameters) {
    lines.push_back(parameter.slice ? c10::str("slice of parameter \"", parameter.name(), "\"")
                                    : describe(parameter));
  }
  world->check_agreement("the wrapped model, over the tensor-parallel group", lines);
}

bool rounds_at_random(const Options& options) {
  return options.low_precision_update == LowPrecisionUpdate::kStochasticRounding ||
         options.optimizer_state != StateFormat::kFp32;
}

// What the stages of a pipeline decide together.
void check_part(const ModelPart& part, const Options& options) {
  if (part.ranks.size() == 1) return;
  part.ranks.check_agreement("the wrapped model, over the stages of the pipeline",
                             describe(options));
  ZP_CHECK(options.offload.step == StepWhen::kInStep,
           "options.offload.step: a stage of a pipeline makes its step when all stages have ended "
           "their backwards, since they agree on it; use StepWhen::kInStep");
  const bool is_tied = std::any_of(part.parameters.begin(), part.parameters.end(),
                                   [](const TensorOfModel& of) { return of.copy_on.has_value(); });
  ZP_CHECK(!is_tied || !rounds_at_random(options),
           "options: the two stages that have a tied weight would round it, or its optimizer "
           "states, by other random numbers; use LowPrecisionUpdate::kMasterWeights and states in "
           "fp32, or untie the weight");
}

// Before anything is moved. Returns the limits that hold from there on. held_bytes: of the module.
std::shared_ptr<memory::MemoryLimitScope> check_memory(const ParameterPages& pages,
                                                       const Options& options, int64_t held_bytes,
                                                       bool is_wrapped,
                                                       std::shared_ptr<StepFacts> facts) {
  const comm::World& world = pages.world();
  const BytePlan& plan = pages.plan();
  const memory::TierBytes held = plan.held_with_gradients(/*states=*/0);
  check_limits_hold(world, options, "the model", held, plan.transient_bytes());
  check_device_holds(world, "the model",
                     {.persistent = held[memory::Tier::kDevice],
                      .transient_bytes = plan.transient_bytes(),
                      .held_bytes = held_bytes});
  if (pages.page_offload()) {
    check_host_holds(world, "what is offloaded of the model", held[memory::Tier::kHost].total(),
                     device::read_host_memory());
  }
  return limit_memory(world,
                      {.options = options,
                       .layouts = pages.layouts(),
                       .places = places_of(pages.worlds()),
                       .is_wrapped = is_wrapped},
                      std::move(facts), held_bytes);
}

// Who shares which pages.
PageWorlds worlds_of(const comm::World& world, const std::vector<NamedParameter>& parameters,
                     const Options& options) {
  PageWorlds worlds(world, options.shard_within, options.secondary_shard_within);
  const ParameterSlice* const experts = cut_of_experts(parameters);
  if (experts == nullptr) return worlds;
  const int ranks = experts->ranks.size() * experts->same_experts->size();
  ZP_CHECK(world.size() == ranks, "the module's experts are cut over ", experts->ranks.size(),
           " ranks, ", experts->same_experts->size(),
           " have the same ones, and it is wrapped over ", world.size(), " ranks: expected all ",
           ranks, "; wrap it over the mesh that expert_parallel() got");
  ZP_CHECK(
      !options.world_invariant,
      "options.world_invariant: experts that are cut over ranks add up tokens in an order that "
      "depends on the number of ranks; leave it or expert_parallel() out");
  worlds.cut_experts(experts->ranks, *experts->same_experts);
  return worlds;
}

ShardedModel shard(std::vector<NamedParameter> parameters, const comm::World& world,
                   const Options& options, Unfrozen unfrozen, ModelOfParameters model = {},
                   const DeferredValues* deferred = nullptr) {
  PageWorlds worlds = worlds_of(world, parameters, options);
  if (!model.tensor) model.tensor = tensor_world_of(parameters);
  check_agreement_over_slices(model.tensor, parameters, options);
  if (model.part) check_part(*model.part, options);
  int64_t held_bytes = 0;
  for (const NamedParameter& parameter : parameters) {
    check_not_wrapped(parameter);
    check_accumulates(parameter, options);
    check_can_be_split(parameter, options);
    if (!parameter.tensor.is_meta()) held_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  std::shared_ptr<memory::MemoryLimitScope> limits;
  const auto facts = std::make_shared<StepFacts>();
  PageParts parts;
  try {
    parts = make_pages(
        std::move(worlds), std::move(parameters), pages_options(options, world, std::move(model)),
        deferred, [&](const ParameterPages& pages) {
          limits = check_memory(pages, options, held_bytes,
                                /*is_wrapped=*/unfrozen == Unfrozen::kInForward, facts);
        });
  } catch (c10::OutOfMemoryError& error) {
    error.add_context(
        "while the model is wrapped: one that was constructed with values is whole until it is in "
        "its pages; construct it without memory (zeropage/distributed_data_parallel.h), or raise "
        "the limit");
    throw;
  }
  tell_of_slow_precision(world, parts.pages->layouts());
  // A module that was on the device leaves the memory of its storages with LibTorch's allocator, in pieces that what
  // comes next does not fit into.
  if (held_bytes > 0) memory::release_cached_memory(world.device());
  auto agreement = std::make_shared<RankAgreement>(parts);
  auto reducer = std::make_shared<GradientReducer>(
      parts, make_gradient_buckets(options, parts.pages), agreement, unfrozen);
  auto gradients = std::make_shared<StepGradients>(reducer, parts.in_place);
  auto sums = std::make_shared<NormSummer>(parts.pages, gradients, agreement);
  parts.pages->world().add_module();
  return {std::move(parts),   std::move(agreement),
          std::move(reducer), std::move(gradients),
          std::move(sums),    options,
          std::move(limits),  facts};
}

bool has_batch_norm(const torch::nn::Module& module) {
  const ModuleSelection norms = ModuleSelection::batch_norms();
  bool found = norms.contains("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    found |= norms.contains(child.key(), *child.value());
  }
  return found;
}

}  // namespace

ShardedModel shard_module_parameters(const torch::nn::Module& module, const comm::World& world,
                                     const std::optional<comm::World>& tensor,
                                     const Options& options,
                                     const operators::ConstructionTape* tape) {
  validate(options);
  check_world_invariant(world, options);
  auto parameters = parameters_of(module, options);
  std::vector<std::string> lines = describe(options);
  for (const NamedParameter& parameter : parameters) lines.push_back(describe(parameter));
  for (const auto& buffer : module.named_buffers()) {
    lines.push_back(c10::str("buffer \"", buffer.key(), "\": ", buffer.value().scalar_type(), " ",
                             buffer.value().sizes()));
  }
  lines.push_back(c10::str("deferred construction: ", tape != nullptr));
  world.check_agreement("the wrapped model", lines);
  std::optional<DeferredValues> deferred;
  if (tape != nullptr) deferred.emplace(DeferredValues{*tape, module.buffers()});
  ShardedModel model = shard(std::move(parameters), world, options, Unfrozen::kInForward,
                             {model_part_of(module), tensor}, deferred ? &*deferred : nullptr);
  if (has_batch_norm(module)) model.facts->note_batch_norm();
  return model;
}

ShardedModel shard_bare_parameters(const std::vector<at::Tensor>& tensors, const comm::World& world,
                                   const Options& options) {
  validate(options);
  ZP_CHECK(!shards_gradients(options) && !shards_parameters(options),
           "an optimizer over bare parameters does not see forward: stages 2 and 3 need "
           "zeropage::DistributedDataParallel around the module; wrap it, or use stage 0 or 1");
  ZP_CHECK(!options.compute_dtype,
           "options.compute_dtype: an optimizer over bare parameters does not see the module that "
           "would be cast; wrap it in zeropage::DistributedDataParallel, or leave it out");
  auto parameters = parameters_of(tensors);
  std::vector<std::string> lines = describe(options);
  for (const NamedParameter& parameter : parameters) lines.push_back(describe(parameter));
  world.check_agreement("the optimizer's parameters", lines);
  return shard(std::move(parameters), world, options, Unfrozen::kInBackward);
}

}  // namespace zeropage::zero
