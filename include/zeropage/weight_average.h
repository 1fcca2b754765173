// An exponential moving average of the weights, in shards: an evaluation is often better with it than with the weights themselves.
//
//   zeropage::WeightAverage average(model, {.decay = 0.999});
//   for (...) {
//     ...
//     optimizer.step();
//     average.update();
//   }
//   average.swap_in();
//   evaluate(model);
//   average.swap_out();  // as if nothing had happened
//
// Each rank averages what it owns, in fp32: update() is average.mul_(decay).add_(weight, 1 - decay), of master
// weights where there are any. So the bits are those of the same two operators on whole fp32 weights in plain
// LibTorch, at every stage and number of ranks. Buffers (running statistics) are not averaged.
//
// RunState::average saves and loads it with a state. WeightsAs::kAverage exports it:
// save_weights(folder, model, {.average = &average}, {.weights_as = WeightsAs::kAverage}).
//
// Memory: 4 bytes an element that this rank owns (P / N of P at stages 1 to 3, all at stage 0), on the device where
// its weights are updated; while swapped in, as much again for the model's own values. Kind::kOptimizerState.
// update() passes twice over it and sends nothing; a swap gathers each page once.
// Lifetime: shares the pages. Collective: swaps. Threads: the training thread.
// Throws where visit_owned_shards() does (zeropage/owned_shards.h).
#pragma once

#include <memory>

#include "zeropage/detail/model_ref.h"

namespace zeropage::zero {
class AveragedPages;
}  // namespace zeropage::zero

namespace zeropage {

struct WeightAverageOptions {
  // Share of the average that an update keeps, in [0, 1): it averages over some 1 / (1 - decay) steps.
  double decay = 0.999;
};

class WeightAverage {
 public:
  // Begins with the model's weights.
  explicit WeightAverage(const ModelRef& model, const WeightAverageOptions& options = {});
  ~WeightAverage();

  // After each step that changed weights. Throws while swapped in.
  void update();

  // Gives the model the average, rounded to the weights' dtype if there are no master weights. No training step may
  // follow until swap_out().
  void swap_in();
  // Gives the model its own values again, bit for bit. Throws on all ranks alike, and changes nothing, if a weight
  // was written to since swap_in().
  void swap_out();
  bool is_swapped_in() const;

 private:
  friend zero::AveragedPages& pages_of(WeightAverage& average);

  const std::unique_ptr<zero::AveragedPages> pages_;
};

// For saving and loading.
zero::AveragedPages& pages_of(WeightAverage& average);

}  // namespace zeropage
