// Runs that begin, are saved, and go on elsewhere. All ranks have the same samples: for a power of two
// of them the mean has the gradient's bits, so a run's bits do not depend on how many there are.
#pragma once

#include <string>
#include <vector>

#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/state_files.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::testing {

// What a run is sharded over and kept in.
struct Setting {
  int stage = 1;
  int ranks = 1;
  Options options = {};

  Options all() const {
    Options result = options;
    result.stage = stage_of(stage);
    if (result.page_bytes == 0) result.page_bytes = 4096;
    return result;
  }
};

struct Stretch {
  int first = 0;  // step
  int end = 4;
  std::string load;  // "" : from the beginning
  std::string save;  // "" : is not saved
  LoadOptions load_options = {};
};

template <typename Model>
void train_step(Model& model, torch::optim::Optimizer& optimizer, int step) {
  const Samples samples = samples_of(0, step);
  optimizer.zero_grad();
  loss_of(model(samples.inputs).to(torch::kFloat), samples).backward();
  optimizer.step();
}

// Rank 0's parameters and buffers in the end.
template <typename Module, typename A = torch::optim::AdamW>
std::vector<torch::Tensor> trained(const Setting& setting, const Stretch& stretch,
                                   const typename OptimizerTraits<A>::Options& algorithm) {
  std::vector<torch::Tensor> result;
  run_ranks(setting.ranks, [&](comm::World& world) {
    DistributedDataParallel<Module> model(make<Module>(), world, setting.all());
    Optimizer<A> optimizer(model, algorithm);
    if (!stretch.load.empty()) load_state(stretch.load, model, optimizer, stretch.load_options);
    for (int step = stretch.first; step < stretch.end; ++step) train_step(model, optimizer, step);
    if (!stretch.save.empty()) save_state(stretch.save, model, optimizer);
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    for (const auto& item : state) result.push_back(item.value());
  });
  return result;
}

}  // namespace zeropage::testing
