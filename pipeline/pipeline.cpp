#include "zeropage/pipeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include <ATen/ATen.h>

#include "accumulate/stage_backwards.h"
#include "pipeline/schedule/order.h"
#include "pipeline/stage_walk.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"
#include "zeropage/recompute.h"

namespace zeropage {
namespace {

using parallel::Action;
using parallel::ActionKind;
using parallel::ActionLists;

ActionLists lists_of(const PipelineStage& stage, const PipelineOptions& options) {
  try {
    const auto schedule = parallel::make_schedule(options.schedule, stage.chunks());
    const int64_t micro_steps = options.accumulator.micro_steps;
    ZP_CHECK(micro_steps > 0 && micro_steps <= std::numeric_limits<int>::max(),
             "AccumulatorOptions::micro_steps: expected 1 or more, got ", micro_steps);
    ActionLists lists = schedule->actions(stage.ranks().size(), static_cast<int>(micro_steps));
    pipeline::check_order(lists);
    return lists;
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    ZP_THROW("Pipeline: ", error.what());
  }
}

// Each chunk's backward is one of the accumulator's.
AccumulatorOptions options_of(const Pipeline::Model& model, const PipelineOptions& options) {
  const int chunks = model->chunks();
  ZP_CHECK(chunks == 1 || !sharded_parameters_of(model).options.world_invariant,
           "options.world_invariant: adds up micro-batches as they are numbered, but a rank with ",
           chunks, " chunks has several backwards for each; use a schedule with one chunk");
  AccumulatorOptions accumulator = options.accumulator;
  accumulator.micro_steps *= chunks;
  return accumulator;
}

constexpr const char* kDependsOnNothing =
    "the output of the stage does not depend on its input, so the stages before it would not "
    "train; "
    "use what the layer is given";

}  // namespace

struct Pipeline::Parts {
  Parts(Model& wrapped, const PipelineOptions& options)
      : model(wrapped),
        run_forward(options.run_forward),
        lists(lists_of(*wrapped.module(), options)),
        schedule(parallel::make_schedule(options.schedule, wrapped->chunks())->name()),
        splits_backward(
            parallel::make_schedule(options.schedule, wrapped->chunks())->splits_backward()),
        rank(wrapped->ranks().rank()),
        walk(wrapped->ranks(), wrapped.all_ranks(), lists),
        accumulator(wrapped, options_of(wrapped, options)) {}

  using Place = std::pair<int, int>;  // chunk and micro-batch
  // What waits for its backward. The last stage's output is the loss.
  struct Pass {
    at::Tensor input;
    at::Tensor output;
  };
  // What a run is given.
  struct Given {
    const std::vector<at::Tensor>& inputs;
    const Loss& loss;
    const std::vector<double>& weights;

    double weight_of(const Action& action) const {
      return weights.empty() ? 1 : weights[static_cast<size_t>(action.micro_batch)];
    }
  };

  const std::vector<Action>& own_actions() const {
    return lists.of_rank[static_cast<size_t>(rank)];
  }
  static Place place_of(const Action& action) { return {action.chunk, action.micro_batch}; }
  bool is_first(const Action& action) const { return lists.stage(rank, action.chunk) == 0; }
  bool is_last(const Action& action) const {
    return lists.stage(rank, action.chunk) == lists.stages() - 1;
  }

  void check_inputs(const std::vector<at::Tensor>& inputs, int64_t micro_batches) const {
    ZP_CHECK(rank != 0 || static_cast<int64_t>(inputs.size()) == micro_batches,
             "Pipeline: expected the inputs of ", micro_batches,
             " micro-batches on the first rank, got ", inputs.size());
  }

  at::Tensor input_of(const Action& action, const std::vector<at::Tensor>& inputs) {
    if (is_first(action)) return inputs[static_cast<size_t>(action.micro_batch)];
    return walk.received(action);
  }

  at::Tensor through_model(const std::function<at::Tensor()>& forward) const {
    return run_forward ? run_forward(forward) : forward();
  }

  // Since then nothing was dropped, and nothing computed again.
  void check_keeps_activations(const checkpointing::RecomputeStatistics& before) const {
    if (!splits_backward) return;
    const auto now = checkpointing::recompute_statistics();
    ZP_CHECK(now.forwards == before.forwards && now.replays == before.replays,
             "activations are recomputed (by a checkpointed region, or a Recompute), which the "
             "schedule \"",
             schedule,
             "\" would do in each half of the backward; keep the activations, or use 1f1b");
  }

  void forward(const Action& action, const Given& given) {
    at::Tensor input = input_of(action, given.inputs);
    if (!is_first(action)) input.requires_grad_(true);
    const auto before = checkpointing::recompute_statistics();
    const at::Tensor output = through_model([&] {
      const at::Tensor from_stage = model(action.chunk, input);
      return is_last(action) ? given.loss(from_stage, action.micro_batch) : from_stage;
    });
    check_keeps_activations(before);
    if (walk.sends(action)) walk.send(action, output);
    passes[place_of(action)] = {input, output};
  }

  // Not where nothing before the output trains, as in a first stage that is frozen. The input of the others does.
  bool trains(const Action& action, const Pass& pass) const {
    const bool trains = pass.output.requires_grad();
    ZP_CHECK(trains || is_first(action), kDependsOnNothing);
    return trains;
  }

  void backward(const Action& action, const Given& given) {
    const Pass pass = passes.extract(place_of(action)).mapped();
    if (is_last(action)) {
      accumulator.backward(pass.output, given.weight_of(action));
    } else {
      const at::Tensor gradient = walk.received(action);
      if (trains(action, pass)) {
        accumulator.stage_backwards().through(pass.output, gradient);
      } else {
        accumulator.stage_backwards().past_frozen();
      }
    }
    send_gradient(action, is_first(action) ? at::Tensor() : pass.input.grad());
  }

  // The first stage's input has no gradient. So there the other half is the whole backward.
  void input_gradient(const Action& action, const Given& given) {
    const Pass pass = passes.extract(place_of(action)).mapped();
    const at::Tensor input = is_first(action) ? at::Tensor() : pass.input;
    const auto before = checkpointing::recompute_statistics();
    accumulate::SplitMicroStep split;
    if (is_last(action)) {
      split = accumulator.stage_backwards().begin(pass.output, input, given.weight_of(action));
    } else {
      const at::Tensor gradient = walk.received(action);
      if (trains(action, pass)) {
        split = accumulator.stage_backwards().begin_through(pass.output, gradient, input);
      }
    }
    check_keeps_activations(before);
    send_gradient(action, split.input_gradient());
    splits.emplace(place_of(action), std::move(split));
  }

  void weight_gradient(const Action& action) {
    accumulator.stage_backwards().finish(std::move(splits.extract(place_of(action)).mapped()));
  }

  void send_gradient(const Action& action, const at::Tensor& gradient) {
    if (!walk.sends(action)) return;
    ZP_CHECK(gradient.defined(), kDependsOnNothing);
    walk.send(action, gradient);
  }

  void perform(const Action& action, const Given& given) {
    switch (action.kind) {
      case ActionKind::kForward:
        return forward(action, given);
      case ActionKind::kBackward:
        return backward(action, given);
      case ActionKind::kInputGradient:
        return input_gradient(action, given);
      case ActionKind::kWeightGradient:
        return weight_gradient(action);
    }
  }

  // What an earlier run has sent may still arrive, and would be taken for this one's. A model is parked on all ranks or on none, so
  // that nobody waits for who refuses here.
  void check_can_run(const char* what) const {
    ZP_CHECK(!model.is_parked(), what, ": the model is parked; call resume() first");
    ZP_CHECK(
        !walk.is_broken(), what,
        ": the run before ended with an error, and the stages could not tell each other: ranks "
        "are lost or out of step; end all ranks, and restart from the last saved state");
  }

  void check(const Given& given) const {
    check_inputs(given.inputs, lists.micro_batches);
    const bool has_loss = rank == lists.ranks() - 1;
    ZP_CHECK(!has_loss || given.loss, "Pipeline::run: expected a loss on the last rank, got none");
    ZP_CHECK(!has_loss || given.weights.empty() ||
                 static_cast<int>(given.weights.size()) == lists.micro_batches,
             "Pipeline::run: expected a weight for each of ", lists.micro_batches,
             " micro-batches, or none, got ", given.weights.size());
    ZP_CHECK(c10::GradMode::is_enabled(),
             "Pipeline::run: expected that gradients are computed, but a torch::NoGradGuard is "
             "alive; end it before run(), or call evaluate()");
  }

  void check_stepped() const {
    const int64_t made = accumulator.micro_step(), expected = accumulator.micro_steps();
    ZP_CHECK(made == 0,
             "Pipeline::run: the run before was not stepped; call accumulator().step(optimizer), "
             "or accumulator().abandon() to drop it");
    ZP_CHECK(expected == int64_t{lists.micro_batches} * lists.chunks, "Pipeline::run: expected ",
             int64_t{lists.micro_batches} * lists.chunks,
             " micro-steps, as the pipeline was made for, but accumulator().set_micro_steps(",
             expected, ") has set others; make a Pipeline for as many micro-batches");
  }

  // After a run that failed on all stages: what it left of its step.
  void drop() {
    passes.clear();
    splits.clear();
    try {
      accumulator.abandon();
    } catch (const std::exception&) {
      // Somebody reads the gradients under a guard. The next run says that the step is still open.
    }
  }

  // So that it arrives beside the action before it.
  void receive_ahead_of(const std::vector<Action>& actions, size_t next) {
    if (next < actions.size()) walk.receive_ahead_of(actions[next]);
  }

  Model& model;
  const std::function<at::Tensor(const std::function<at::Tensor()>&)> run_forward;
  const ActionLists lists;
  const std::string schedule;
  const bool splits_backward;
  const int rank;
  pipeline::StageWalk walk;
  Accumulator accumulator;
  std::map<Place, Pass> passes;
  std::map<Place, accumulate::SplitMicroStep> splits;  // whose weight gradient follows
  std::vector<parallel::TimedAction> timeline;
};

Pipeline::Pipeline(Model& model, const PipelineOptions& options)
    : parts_(std::make_unique<Parts>(model, options)) {}

Pipeline::~Pipeline() = default;

void Pipeline::run(const std::vector<at::Tensor>& inputs, const Loss& loss,
                   const std::vector<double>& weights) {
  Parts& parts = *parts_;
  parts.check_can_run("Pipeline::run");
  parts.check_stepped();
  const Parts::Given given{inputs, loss, weights};
  const std::vector<Action>& actions = parts.own_actions();
  size_t next = 0;
  parts.timeline.clear();
  try {
    parts.walk.run({.actions = actions,
                    .begin = [&] { parts.check(given); },
                    .perform =
                        [&](const Action& action) {
                          parts.receive_ahead_of(actions, next++);
                          parts.receive_ahead_of(actions, next);
                          parts.perform(action, given);
                          parts.timeline.push_back(
                              {action, parts.walk.begun_s(), pipeline::StageWalk::now_s()});
                        },
                    .advice =
                        "The step is dropped on all ranks of the pipeline, and the next run() "
                        "may follow"});
  } catch (...) {
    if (!parts.walk.is_broken()) parts.drop();
    throw;
  }
}

void Pipeline::evaluate(const std::vector<at::Tensor>& inputs, int64_t micro_batches,
                        const Visit& visit) {
  Parts& parts = *parts_;
  parts.check_can_run("Pipeline::evaluate");
  const at::NoGradGuard no_grad;
  std::vector<Action> actions;
  for (int micro_batch = 0; micro_batch < static_cast<int>(micro_batches); ++micro_batch) {
    for (int chunk = 0; chunk < parts.lists.chunks; ++chunk) {
      actions.push_back({ActionKind::kForward, chunk, micro_batch});
    }
  }
  parts.walk.run({.actions = actions,
                  .begin = [&] { parts.check_inputs(inputs, micro_batches); },
                  .perform =
                      [&](const Action& action) {
                        const at::Tensor output =
                            parts.model(action.chunk, parts.input_of(action, inputs));
                        if (parts.walk.sends(action)) {
                          parts.walk.send(action, output);
                        } else if (visit) {
                          visit(output, action.micro_batch);
                        }
                      },
                  .advice = "All ranks of the pipeline have ended the evaluation, and may go on"});
}

Accumulator& Pipeline::accumulator() {
  return parts_->accumulator;
}

at::Tensor Pipeline::loss() const {
  const comm::World& ranks = parts_->model->ranks();
  at::Tensor loss = parts_->accumulator.loss();
  if (!loss.defined()) {
    loss =
        at::full({}, std::nan(""), at::TensorOptions().dtype(at::kDouble).device(ranks.device()));
  }
  loss = loss.clone();
  if (ranks.size() > 1) {
    ranks.communicator()
        .broadcast(loss.view({-1}), /*root=*/ranks.size() - 1, "the loss of the step")
        .wait();
  }
  return loss;
}

void Pipeline::expect_activations(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  ZP_CHECK(parts_->walk.messages().are_counted_only(),
           "Pipeline::expect_activations: is for a simulated world; elsewhere the stages tell each "
           "other, so leave it out");
  parts_->walk.messages().expect({sizes, dtype});
}

parallel::TimedStep Pipeline::timed_step() const {
  const parallel::TimedStep own{
      .schedule = parts_->schedule, .chunks = parts_->lists.chunks, .timeline = {parts_->timeline}};
  parallel::TimedStep all{.schedule = own.schedule, .chunks = own.chunks, .timeline = {}};
  double first = std::numeric_limits<double>::infinity();
  for (const std::string& text :
       parts_->model->ranks().gather_text("what the stages did", parallel::to_json(own))) {
    all.timeline.push_back(parallel::timed_step(text, "a stage").timeline.front());
    if (!all.timeline.back().empty()) first = std::min(first, all.timeline.back().front().begin_s);
  }
  for (auto& of_rank : all.timeline) {
    for (parallel::TimedAction& action : of_rank) {
      action.begin_s -= first;
      action.end_s -= first;
    }
  }
  return all;
}

comm::Traffic Pipeline::sent() const {
  return parts_->walk.messages().sent();
}

int64_t Pipeline::micro_batches() const {
  return parts_->lists.micro_batches;
}

}  // namespace zeropage
