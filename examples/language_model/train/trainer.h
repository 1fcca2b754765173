// Trains a language model on the rows of all ranks.
//
//   TrainingOptions options{.steps = 200, .batch = 16};
//   Trainer trainer(model, rows, options);
//   trainer.resume();
//   const TrainingEnd end = trainer.run();
//
// A step takes the mean over all targets of its rows, however many each micro-batch and each rank has. So results do not depend
// on ranks and micro-batches, but for the order of sums.
// Lifetime: model, rows and options outlive it. Collective: all. Threads: the training thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <zeropage/accumulator.h>
#include <zeropage/optimizer.h>
#include <zeropage/recompute.h>
#include <zeropage/saving.h>

#include "language_model/data/rows.h"
#include "language_model/model/wrapped_model.h"

namespace language_model {

struct TrainingOptions {
  int64_t steps = 100;
  int64_t batch = 8;        // rows of a step, over all ranks
  int64_t micro_batch = 1;  // rows of one forward of a rank
  double learning_rate = 2e-5;
  double least_rate = 0.1;     // at the end, as a share of learning_rate
  int64_t warm_up = 10;        // steps over which the rate rises from 0
  double weight_decay = 0.01;  // of matrices; vectors are not decayed
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip_norm = 1;  // 0: none
  uint64_t seed = 1;     // of the rows' order
  // The most bytes of activations, for which operators are computed again in backward; 0: as many as there are.
  int64_t activation_budget_bytes = 0;
  std::string save;            // folder of states; "": none
  int64_t save_every = 0;      // steps; 0: at the end
  int64_t evaluate_every = 0;  // steps; 0: before the first and behind the last
  // What a state says of its run, by name: its model, its rows. A run that goes on with others notes them.
  std::map<std::string, std::string> settings = {};
  // The same, which must be equal.
  std::map<std::string, std::string> fixed_settings = {};
};
// Throws with all that makes no sense.
void check(const TrainingOptions& options);
// The learning rate of that step, from 0 on: linear warm-up, then a cosine down to the least.
double learning_rate_at(const TrainingOptions& options, int64_t step);

struct TrainedStep {
  int64_t step = 0;  // made so far
  double loss = 0;   // mean over the step's targets
  double norm = 0;   // of the gradient, before it is clipped
  double rate = 0;
  int64_t targets = 0;
  double seconds = 0;
  bool skipped = false;  // the gradient was not finite
};

class Trainer {
 public:
  struct Report {
    // On all ranks; the figures are those of all.
    std::function<void(const TrainedStep&)> step = nullptr;
    // The loss on held-out text, measured behind so many steps.
    std::function<void(int64_t step, double loss)> held_out = nullptr;
    // A sentence for the log, such as where a run goes on.
    std::function<void(const std::string&)> note = nullptr;
  };

  // evaluate: the loss on held-out text; may be empty.
  Trainer(WrappedModel& model, const TrainingRows& rows, const TrainingOptions& options,
          Report report, std::function<double()> evaluate = nullptr);

  // Goes on from the newest whole state in options.save, if there is one. Otherwise a state there of another run is refused.
  void resume(bool if_there);
  // Returns the signal that ended it after a save, or 0.
  int run();

  int64_t step() const { return state_.step; }

 private:
  static std::vector<torch::optim::OptimizerParamGroup> groups_of(const WrappedModel& model,
                                                                  const TrainingOptions& options);
  TrainedStep train_step();
  // This rank's rows of a micro-step. weight: their targets, 0 for rows that are repeated so that all ranks have some.
  Rows micro_rows(int64_t micro, double& weight);
  void evaluate_at(int64_t step);
  void check_finite(const TrainedStep& trained);
  void compare_settings();
  // Takes the state, and keeps what this run was asked for.
  void load_newest();
  int end_after_save(int signal);

  WrappedModel& model_;
  const TrainingRows& rows_;
  const TrainingOptions& options_;
  const Report report_;
  const std::function<double()> evaluate_;
  RowOrder order_;
  std::optional<zeropage::checkpointing::Recompute> recompute_;
  zeropage::Optimizer<torch::optim::AdamW> optimizer_;
  zeropage::Accumulator accumulator_;
  std::optional<zeropage::StateSaver> saver_;
  zeropage::RunState state_;
  int64_t skipped_in_a_row_ = 0;
};

}  // namespace language_model
