#include "planning/trial.h"

#include <algorithm>
#include <utility>

#include "parallel/context/blocks.h"
#include "planning/simulated_workspaces.h"
#include "planning/touched_bytes.h"
#include "zero/plan/byte_plan.h"
#include "zero/setup/sharded_model.h"
#include "zero/update/sharded_updates.h"
#include "zeropage/context_parallel.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/experts.h"
#include "zeropage/mesh.h"
#include "zeropage/recompute.h"

namespace zeropage::planning {
namespace {

using checkpointing::ActivationScope;
using checkpointing::EveryBlocks;
using checkpointing::Recompute;
using memory::Tier;

comm::Mesh simulated(const WorldDescription& world) {
  std::vector<comm::MeshAxis> axes = {{"data", world.ranks / (world.expert * world.context)}};
  // A mesh that has it is for modules whose experts are cut.
  if (world.expert > 1) axes.push_back({"expert", world.expert});
  axes.push_back({"context", world.context});
  return {
      comm::World::simulated({.topology = comm::Topology::even(world.ranks, world.ranks_per_host)}),
      axes};
}

// Experts over the axis "expert" and attention over "context", where the world has these.
auto mark_of(const WorldDescription& world, const comm::Mesh& mesh) {
  return [&world, &mesh](torch::nn::Module& module) {
    if (world.expert > 1) expert_parallel(module, mesh);
    if (world.context > 1) {
      parallel::context_parallel(module, mesh["context"], world.context_form);
    }
  };
}

comm::LinkTraffic sent_in(const comm::World& world) {
  const auto& figures = comm::SimulatedCommunicator::of(world.communicator()).figures();
  comm::LinkTraffic sum;
  for (const comm::SimulatedCost& cost : figures.by_operation) sum += cost.sent;
  return sum;
}

}  // namespace

struct Trial::Parts {
  Parts(const detail::MakePlannedModel& make, const WorldDescription& description,
        const Options& options, const AccumulatorOptions& accumulation)
      : mesh(simulated(description)),
        planned(make(mesh, mark_of(description, mesh), options)),
        accumulator(*planned.model, accumulation),
        workspaces(description.allocator.workspaces) {}

  // Over all worlds that the model sends in.
  comm::LinkTraffic sent() const {
    const zero::PageWorlds& worlds = sharded_parameters_of(*planned.model).pages->worlds();
    comm::LinkTraffic sum = sent_in(worlds.all);
    for (const char* axis : {"expert", "context"}) {
      if (mesh.has(axis) && mesh[axis].size() > 1) sum += sent_in(mesh[axis]);
    }
    if (worlds.same_experts) sum += sent_in(*worlds.same_experts);
    if (!worlds.replicas) return sum;
    sum += sent_in(worlds.shards);
    sum += sent_in(*worlds.replicas);
    return sum;
  }

  // touched: of forward; null where nobody asks, or a recompute looks at operators.
  void step(Recompute* recompute, TouchedBytes* touched) {
    for (int64_t micro_step = 0; micro_step < accumulator.micro_steps(); ++micro_step) {
      at::Tensor loss;
      workspaces.before_forward();
      {
        std::optional<ActivationScope> scope;
        if (recompute != nullptr) scope.emplace(*recompute);
        std::optional<operators::InterceptorScope> counted;
        if (touched != nullptr) counted.emplace(touched);
        loss = planned.loss();
      }
      workspaces.before_backward();
      accumulator.backward(loss);
    }
    accumulator.step(*planned.optimizer);
  }

  const comm::Mesh mesh;
  const detail::PlannedModel planned;
  Accumulator accumulator;
  SimulatedWorkspaces workspaces;
};

Trial::Trial(const detail::MakePlannedModel& make, const WorldDescription& world,
             const Options& options, const AccumulatorOptions& accumulation)
    : described_(world),
      ledger_(std::make_shared<memory::Ledger>("the plan")),
      allocations_(std::make_shared<AllocationRecord>()),
      parts_([&] {
        const memory::LedgerScope scope(ledger_);
        ledger_->sink().exchange(allocations_);
        return std::make_unique<Parts>(make, world, options, accumulation);
      }()),
      held_(allocations_->take()) {}

Trial::~Trial() {
  ledger_->sink().exchange(nullptr);
}

int64_t Trial::parameters() const {
  int64_t numel = 0;
  for (const at::Tensor& parameter : parts_->planned.model->parameters()) {
    numel += parameter.numel();
  }
  // Experts of the other ranks.
  const auto modules = parts_->planned.model->untyped_module().modules();
  for (const auto& module : modules) {
    const auto* const experts = dynamic_cast<const parallel::ExpertsImpl*>(module.get());
    if (experts == nullptr) continue;
    for (const auto& [slice, cut] : experts->sliced_parameters()) {
      if (slice.defined()) numel += slice.numel() * (experts->ranks_of_slices().size() - 1);
    }
  }
  return numel;
}

memory::TierBytes Trial::held(const Options& options) const {
  const auto states = updates_of(*parts_->planned.optimizer).states_of_a_parameter();
  const zero::ParameterPages& pages = *sharded_parameters_of(*parts_->planned.model).pages;
  return zero::BytePlan(pages.layouts(), options, zero::places_of(pages.worlds())).held(states);
}

const MicroStepReduction& Trial::reduction() const {
  return parts_->accumulator.reduction();
}

int64_t Trial::updated_numel() const {
  int64_t numel = 0;
  const zero::ParameterPages& pages = *sharded_parameters_of(*parts_->planned.model).pages;
  for (const zero::PagePlan& page : pages.plan().pages()) {
    if (page.own_gradient_bytes > 0) numel += page.owned.numel();
  }
  return numel;
}

int64_t Trial::buffer_bytes() const {
  const auto& page_offload = sharded_parameters_of(*parts_->planned.model).pages->page_offload();
  return page_offload ? page_offload->buffer_bytes() : 0;
}

const checkpointing::ModuleBlocks& Trial::find_blocks(const std::vector<std::string>& lists) {
  if (!blocks_) {
    blocks_ = checkpointing::find_blocks(parts_->planned.model->untyped_module(), lists);
  }
  return *blocks_;
}

StepFigures Trial::run(CheckpointPolicy policy) {
  const memory::LedgerScope scope(ledger_);
  const parallel::context::SimulatedDeviceScope blocks(described_.has_allocator());
  std::optional<Recompute> recompute;
  if (policy == CheckpointPolicy::kSelective) {
    recompute =
        zeropage::recompute(*parts_->planned.model, checkpointing::RecomputeOptions::selective());
  }
  if (policy == CheckpointPolicy::kBlocks && blocks_) {
    recompute = zeropage::recompute(*parts_->planned.model,
                                    checkpointing::RecomputeOptions::by_blocks(*blocks_));
  }
  const bool by_blocks = policy == CheckpointPolicy::kBlocks && !blocks_;
  if (by_blocks) parts_->planned.checkpoint_blocks(EveryBlocks::each());
  ledger_->reset_peak();
  // Makes the optimizer's states, and records the order of pages, which each policy has of its own.
  const bool has_pages = sharded_parameters_of(*parts_->planned.model).paging->pager() != nullptr;
  if (!std::exchange(has_stepped_, true) || has_pages) {
    parts_->step(recompute ? &*recompute : nullptr, nullptr);
  }
  const comm::LinkTraffic sent_before = parts_->sent();
  const checkpointing::RecomputeStatistics before = checkpointing::recompute_statistics();
  TouchedBytes touched;
  parts_->step(recompute ? &*recompute : nullptr,
               policy == CheckpointPolicy::kNone ? &touched : nullptr);
  const checkpointing::RecomputeStatistics after = checkpointing::recompute_statistics();
  if (by_blocks) parts_->planned.checkpoint_blocks(EveryBlocks::none());
  StepFigures figures;
  figures.sent = parts_->sent();
  figures.sent -= sent_before;
  figures.forward_flops = after.forward_flops - before.forward_flops;
  figures.forward_bytes = touched.bytes();
  figures.recomputed_flops = after.recomputed_flops - before.recomputed_flops;
  figures.at_peak[Tier::kDevice] = ledger_->at_peak(c10::kMeta);
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    figures.at_peak[tier] = ledger_->offloaded_at_peak(tier);
  }
  tell_reserved(figures);
  return figures;
}

// Tells what a process reserves that takes what is held, and then makes these steps.
void Trial::tell_reserved(StepFigures& figures) {
  const std::vector<AllocationChange> steps = allocations_->take();
  if (!described_.has_allocator()) return;
  const int64_t limit = described_.device_memory_bytes;
  const auto reserve = [&](int64_t limit_bytes) {
    Reserving reserving(
        {.expandable_segments = described_.allocator.segments == AllocatorSegments::kExpandable,
         .limit_bytes = limit_bytes});
    reserving.apply(held_);
    // The second time as the steps that follow.
    for (int times = 0; times < 2; ++times) reserving.apply(steps);
    return reserving.so_far();
  };
  Reservation reserved = reserve(limit);
  if (!reserved.fits()) {
    reserved = reserve(/*limit_bytes=*/0);
    figures.missing_reserved_bytes = std::max<int64_t>(1, reserved.peak_bytes - limit);
  }
  figures.reserved_bytes = reserved.peak_bytes;
  hold_what_stays(held_, steps);
}

}  // namespace zeropage::planning
