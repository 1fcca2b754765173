#include "language_model/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <utility>

#include <zeropage/state_folder.h>

namespace language_model {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostSkippedInARow = 10;

// readers: RowReaders::count.
int64_t micro_steps_of(const TrainingOptions& options, int64_t readers) {
  return (options.batch + options.micro_batch * readers - 1) / (options.micro_batch * readers);
}

zeropage::AccumulatorOptions accumulation(const TrainingOptions& options, int64_t readers) {
  zeropage::AccumulatorOptions accumulator{.micro_steps = micro_steps_of(options, readers)};
  if (options.clip_norm > 0) accumulator.clip_norm = options.clip_norm;
  return accumulator;
}

}  // namespace

void check(const TrainingOptions& options) {
  std::string wrong;
  const auto need = [&](bool holds, const std::string& what) {
    if (!holds) wrong += "\n  " + what;
  };
  need(options.steps > 0, "steps: expected 1 or more");
  need(options.batch > 0, "batch: expected 1 row or more");
  need(options.micro_batch > 0, "micro_batch: expected 1 row or more");
  need(options.micro_batch <= options.batch, "micro_batch: more rows than a step has");
  need(options.learning_rate > 0 && std::isfinite(options.learning_rate),
       "learning_rate: expected a finite number above 0");
  need(options.least_rate >= 0 && options.least_rate <= 1, "least_rate: expected 0 to 1");
  need(options.warm_up >= 0, "warm_up: expected 0 steps or more");
  need(options.weight_decay >= 0, "weight_decay: expected 0 or more");
  need(options.beta1 >= 0 && options.beta1 < 1, "beta1: expected 0 to below 1");
  need(options.beta2 >= 0 && options.beta2 < 1, "beta2: expected 0 to below 1");
  need(options.clip_norm >= 0, "clip_norm: expected 0 or more");
  TORCH_CHECK(wrong.empty(), "training cannot begin:", wrong);
}

double learning_rate_at(const TrainingOptions& options, int64_t step) {
  const double highest = options.learning_rate;
  if (step < options.warm_up) {
    return highest * static_cast<double>(step + 1) / static_cast<double>(options.warm_up);
  }
  const auto left = static_cast<double>(std::max<int64_t>(1, options.steps - options.warm_up));
  const double done = std::min(1.0, static_cast<double>(step - options.warm_up) / left);
  const double cosine = (1 + std::cos(std::numbers::pi * done)) / 2;
  return highest * (options.least_rate + (1 - options.least_rate) * cosine);
}

std::vector<torch::optim::OptimizerParamGroup> Trainer::groups_of(const WrappedModel& model,
                                                                  const TrainingOptions& options) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const torch::Tensor& parameter : model.parameters()) {
    if (parameter.requires_grad()) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto add = [&](std::vector<torch::Tensor> parameters, double decay) {
    if (parameters.empty()) return;
    const auto adam = torch::optim::AdamWOptions(options.learning_rate)
                          .betas({options.beta1, options.beta2})
                          .weight_decay(decay);
    groups.emplace_back(std::move(parameters), std::make_unique<torch::optim::AdamWOptions>(adam));
  };
  add(std::move(matrices), options.weight_decay);
  add(std::move(vectors), 0);
  return groups;
}

Trainer::Trainer(WrappedModel& model, const TrainingRows& rows, const TrainingOptions& options,
                 Report report, std::function<double()> evaluate)
    : model_(model),
      rows_(rows),
      options_(options),
      report_(std::move(report)),
      evaluate_(std::move(evaluate)),
      order_(rows.count(), options.seed),
      optimizer_(model, groups_of(model, options)),
      accumulator_(model, accumulation(options, RowReaders(model).count)) {
  check(options);
  if (options.activation_budget_bytes > 0) {
    recompute_ = zeropage::recompute(
        model, zeropage::checkpointing::RecomputeOptions::budget(options.activation_budget_bytes));
  }
  state_.accumulator = &accumulator_;
  if (options.save.empty()) return;
  // Before a state is looked for: from here on no former start of this run saves any more.
  saver_.emplace(options.save, model.all_ranks(),
                 zeropage::StateSaverOptions{.keep_last = 2, .on_signal = true});
}

void Trainer::compare_settings() {
  for (const auto& [name, now] : options_.fixed_settings) {
    const auto saved = state_.values.find(name);
    TORCH_CHECK(saved == state_.values.end() || saved->second == now, options_.save,
                ": the state has ", name, " ", saved->second, ", and this run ", now,
                "; go on with the state's, or train anew");
  }
  for (const auto& [name, now] : options_.settings) {
    const auto saved = state_.values.find(name);
    if (report_.note && saved != state_.values.end() && saved->second != now) {
      report_.note("the state's " + name + " was " + saved->second + ", and is now " + now);
    }
  }
}

void Trainer::load_newest() {
  const auto loaded =
      zeropage::load_state(options_.save, model_, optimizer_, state_, {.fall_back = true});
  std::vector<std::string> notes = {"goes on behind step " + std::to_string(state_.step) +
                                    ", from " + loaded.directory.string()};
  notes.insert(notes.end(), loaded.notes.begin(), loaded.notes.end());
  const auto compare = [&](const std::string& name, double& saved, double asked) {
    if (saved == asked) return;
    notes.push_back(c10::str("the state's ", name, " was ", saved, ", and is now ", asked));
    saved = asked;
  };
  // Learning rates are set by each step.
  bool is_first = true;
  for (auto& group : optimizer_.param_groups()) {
    auto& adam = static_cast<torch::optim::AdamWOptions&>(group.options());
    const bool has_matrices = group.params().front().dim() > 1;
    if (has_matrices) compare("weight decay", adam.weight_decay(), options_.weight_decay);
    auto [beta1, beta2] = adam.betas();
    const size_t before = notes.size();
    compare("beta1", beta1, options_.beta1);
    compare("beta2", beta2, options_.beta2);
    adam.betas({beta1, beta2});
    if (!std::exchange(is_first, false)) notes.resize(before);
  }
  if (state_.step >= options_.steps) {
    notes.push_back(c10::str("the state has made ", state_.step, " steps, and ", options_.steps,
                             " were asked for: nothing is trained"));
  }
  if (!report_.note) return;
  for (const std::string& note : notes) report_.note(note);
}

void Trainer::resume(bool if_there) {
  if (!saver_) return;
  // What rank 0 sees decides, as ranks may see a shared folder at different moments.
  const bool has_state =
      model_.world().rank() == 0 && zeropage::state::newest_step_in(options_.save).has_value();
  if (model_.world().max(has_state ? 1 : 0) > 0) {
    TORCH_CHECK(if_there, options_.save,
                ": has a state of another run; ask to go on with it, or give another folder");
    load_newest();
    compare_settings();
  }
  state_.values = options_.settings;
  state_.values.insert(options_.fixed_settings.begin(), options_.fixed_settings.end());
  zeropage::check_can_save(options_.save, model_, optimizer_);
}

Rows Trainer::micro_rows(int64_t micro, double& weight) {
  const RowReaders readers(model_);
  const int64_t first = (micro * readers.count + readers.rank) * options_.micro_batch;
  const int64_t count = std::min(options_.micro_batch, options_.batch - first);
  std::vector<int64_t> chosen;
  // Without rows of its own a rank repeats the step's first.
  const bool has_own = count > 0;
  for (int64_t i = 0; i < std::max<int64_t>(1, count); ++i) {
    chosen.push_back(order_.row(state_.step * options_.batch + (has_own ? first + i : 0)));
  }
  const Rows own = own_part(model_, rows_.read(chosen));
  weight = has_own ? static_cast<double>(own.learned()) : 0;
  return own;
}

TrainedStep Trainer::train_step() {
  const auto begin = Clock::now();
  TrainedStep trained{.rate = learning_rate_at(options_, state_.step)};
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(trained.rate);
  double own_weight = 0;
  for (int64_t micro = 0; micro < accumulator_.micro_steps(); ++micro) {
    double weight = 0;
    const Rows rows = micro_rows(micro, weight);
    torch::Tensor loss;
    {
      std::optional<zeropage::checkpointing::ActivationScope> scope;
      if (recompute_) scope.emplace(*recompute_);
      loss = model_(rows.tokens, rows.targets, rows.documents);
    }
    accumulator_.backward(loss, weight);
    own_weight += weight;
  }
  const torch::Tensor own_mean = accumulator_.loss();
  const zeropage::StepReport report = accumulator_.step(optimizer_);
  const double own_sum = own_weight > 0 ? own_mean.item<double>() * own_weight : 0;
  trained.step = ++state_.step;
  trained.loss = model_.world().sum(own_sum) / report.weight;
  trained.norm = report.norm;
  trained.targets = static_cast<int64_t>(report.weight);
  trained.skipped = !report.stepped();
  trained.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return trained;
}

void Trainer::evaluate_at(int64_t step) {
  if (!evaluate_) return;
  const double loss = evaluate_();
  if (report_.held_out) report_.held_out(step, loss);
}

// A step that is skipped changes nothing; many in a row will not stop.
void Trainer::check_finite(const TrainedStep& trained) {
  skipped_in_a_row_ = trained.skipped ? skipped_in_a_row_ + 1 : 0;
  const bool is_last = state_.step == options_.steps;
  TORCH_CHECK(!is_last || (!trained.skipped && std::isfinite(trained.loss)), "step ", trained.step,
              ": the last step's loss or gradient is not finite, so nothing is written; lower the "
              "learning rate, "
              "and go on from the last state");
  TORCH_CHECK(
      skipped_in_a_row_ < kMostSkippedInARow, "step ", trained.step, ": the last ",
      skipped_in_a_row_,
      " steps had gradients that are not finite, or no target; lower the learning rate, and "
      "go on from the last state");
}

int Trainer::end_after_save(int signal) {
  saver_->save(model_, optimizer_, state_);
  if (signal == 0) return 0;
  saver_->wait();
  if (report_.note) {
    report_.note("a signal ended the run after the save of step " + std::to_string(state_.step));
  }
  return signal;
}

int Trainer::run() {
  model_.train();
  if (state_.step == 0) evaluate_at(0);
  while (state_.step < options_.steps) {
    const TrainedStep trained = train_step();
    if (report_.step) report_.step(trained);
    check_finite(trained);
    const bool is_last = state_.step == options_.steps;
    const auto is_time = [&](int64_t every) {
      return is_last || (every > 0 && state_.step % every == 0);
    };
    if (saver_) {
      const int signal = saver_->stop_signal();
      if (signal != 0 || is_time(options_.save_every)) {
        const int ended = end_after_save(is_last ? 0 : signal);
        if (ended != 0) return ended;
      }
    }
    if (is_time(options_.evaluate_every)) evaluate_at(state_.step);
  }
  if (saver_) saver_->wait();
  return 0;
}

}  // namespace language_model
