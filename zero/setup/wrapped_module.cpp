#include "zero/setup/wrapped_module.h"

#include <algorithm>
#include <iostream>
#include <utility>

#include <torch/csrc/autograd/graph_task.h>

#include "memory/memory_limit.h"
#include "zero/setup/memory_limits.h"
#include "zeropage/check.h"
#include "zeropage/recompute.h"

namespace zeropage::zero {
namespace {

// Ranks that repeat other operators than others would gather other pages.
void check_recompute(const comm::World& world) {
  ZP_CHECK(
      world.size() == 1 || !checkpointing::Recompute::decides_alone(),
      "recompute by a budget, around the forward of a model whose parameters are sharded over ",
      world.size(),
      " ranks: expected a Recompute whose plan the ranks share, got one by which each rank "
      "decides for itself; make it by zeropage::recompute(model, options) "
      "(zeropage/recompute.h), or set RecomputeOptions::agree");
}

std::vector<std::pair<std::string, at::Tensor>> buffers_by_name(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& buffer : module.named_buffers()) {
    buffers.emplace_back(buffer.key(), buffer.value());
  }
  return buffers;
}

}  // namespace

WrappedModule::WrappedModule(std::shared_ptr<torch::nn::Module> module, RanksOfModel ranks,
                             const Options& options, const operators::ConstructionTape* tape)
    : module_(std::move(module)),
      ranks_(std::move(ranks)),
      options_(options),
      sharded_(shard_module_parameters(*module_, ranks_.data, ranks_.tensor, options, tape)),
      buffers_(std::make_shared<BufferSync>(ranks_.data, buffers_by_name(*module_))),
      parking_(ranks_.all, sharded_, module_, buffers_),
      forwards_(*module_, ranks_.data, ranks_.shares_samples) {
  buffers_->broadcast_all_from_rank_zero();
  for (const PlacedParameter& placed : sharded_.pages->parameters()) {
    versions_.push_back(placed.parameter.tensor._version());
  }
  if (limits_of(world(), options_).any()) {
    std::vector<operators::OperatorLabels::Parameter> parameters;
    for (const auto& parameter : module_->named_parameters()) {
      parameters.push_back({parameter.key(), parameter.value()});
    }
    labels_ = std::make_unique<operators::OperatorLabels>(parameters);
  }
  send_buffers_beside_gradients();
  compare_buffers();
}

// They are rank 0's over the data axis alone: ranks of other slices and stages may have others.
void WrappedModule::compare_buffers() {
  if (world().size() == 1 || buffers_->count() == 0) return;
  const ParameterPages& pages = *sharded_.pages;
  const comm::World* const slices = pages.tensor_world();
  const comm::World* const stages = pipeline_world_of(pages);
  std::string where;
  if (slices != nullptr) where += c10::str(" of slice ", slices->rank());
  if (stages != nullptr) where += c10::str(" of stage ", stages->rank());
  sharded_.agreement->compare_beside(
      {.hash = [buffers = buffers_] { return buffers->hash_unwritten(); },
       .describe = [buffers = buffers_,
                    where](const TellValues& tell) { buffers->describe_unwritten(where, tell); }});
}

// The reducer may outlive the module, with an optimizer.
void WrappedModule::send_buffers_beside_gradients() {
  BesideGradients beside;
  if (options_.broadcast_buffers && world().size() > 1) {
    beside.count = buffers_->count();
    beside.tell = [buffers = buffers_,
                   module = std::weak_ptr<torch::nn::Module>(module_)](uint8_t* written) {
      const auto trained = module.lock();
      if (trained && trained->is_training()) {
        buffers->tell_written(written);
      } else {
        std::fill_n(written, buffers->count(), uint8_t{0});
      }
    };
  }
  beside.hear = [buffers = buffers_, has_reduced = has_reduced_,
                 broadcasts = options_.broadcast_buffers, limits = sharded_.limits,
                 facts = sharded_.facts,
                 attention = forwards_.attention()](const uint8_t* written) {
    *has_reduced = true;
    // A step averages what was set by hand, without a backward.
    const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
    if (attention != nullptr && in_backward) {
      ZP_CHECK(
          attention->was_met(),
          "backward of a module that context_parallel() marked, whose attention saw this rank's "
          "tokens alone: call the wrapped model, model(x), and not the module that it wraps");
    }
    facts->end_backward(limits->activation_peak());
    if (broadcasts) buffers->broadcast_from_rank_zero(written);
  };
  sharded_.reducer->set_beside_gradients(std::move(beside));
}

void WrappedModule::before_forward(int64_t samples) {
  sharded_.memory->check_not_parked("forward()");
  sharded_.memory->check_stream("forward()");
  check_module();
  // An evaluation may use other memory: scripts swap averaged weights in by set_data(), and back.
  if (c10::GradMode::is_enabled()) sharded_.in_place->check("forward()");
  if (sharded_.paging->pager()) check_recompute(world());
  // An evaluation has no step that ends its pass.
  if (const auto& pager = sharded_.paging->pager(); pager && !c10::GradMode::is_enabled()) {
    pager->end_pass(paging::Pass::kInference);
  }
  // No backward follows that would do it. In eval mode buffers do not change, and up to stage 2 one
  // rank may evaluate alone.
  if (options_.broadcast_buffers && module_->is_training() && !c10::GradMode::is_enabled()) {
    buffers_->broadcast_written_from_rank_zero();
  }
  sharded_.reducer->adopt_unfrozen();
  sharded_.reducer->release_zeroed();
  tell_of_foreign_optimizer();
  if (labels_) labels_->begin(memory::StepPhase::kForward);
  sharded_.facts->begin_forward(samples,
                                sharded_.limits->begin_activations(world().device().type()));
  forwards_.begin();
}

void WrappedModule::after_forward() noexcept {
  forwards_.end();
  sharded_.facts->end_forward();
  if (labels_) labels_->begin(memory::StepPhase::kLoss);
}

// Right, but not what the stage promises.
void WrappedModule::tell_of_foreign_optimizer() {
  const bool shards_states = sharded_.pages->plan().ownership() == Ownership::kShard;
  if (told_ || !shards_states || world().size() == 1 || world().rank() != 0 ||
      sharded_.gradients->have_optimizer() || !*has_reduced_) {
    return;
  }
  for (size_t index = 0; index < versions_.size(); ++index) {
    const PlacedParameter& placed = sharded_.pages->parameters()[index];
    if (placed.parameter.tensor._version() == versions_[index]) continue;
    told_ = true;
    std::cerr
        << "zeropage: parameters are updated by an optimizer that is not zeropage's: each rank "
           "keeps its states whole; write zeropage::Optimizer<torch::optim::AdamW>(model, ...) "
           "to shard them\n";
    return;
  }
}

// A parameter that was registered anew would train on this rank alone.
void WrappedModule::check_module() const {
  const auto& known = sharded_.pages->parameters();
  size_t next = 0;
  for (const NamedParameter& parameter : parameters_of(*module_)) {
    const bool same = next < known.size() && known[next].parameter.tensor.is_same(parameter.tensor);
    ZP_CHECK(same, "parameter \"", parameter.name(),
             "\" was registered or replaced after the module was wrapped; change the module first, "
             "then wrap it");
    ++next;
  }
  ZP_CHECK(next == known.size(), "parameter \"", known[next].parameter.name(),
           "\" was taken out of the module after it was wrapped; change the module first, then "
           "wrap it");
}

}  // namespace zeropage::zero
