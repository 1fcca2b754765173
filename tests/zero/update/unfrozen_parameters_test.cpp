// Parameters that were frozen when the model was wrapped, and train from some step on, wherever they and the
// optimizer's states lie.
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/state_files.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::unfrozen_parameters_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using memory::operator""_KiB;

constexpr int kSteps = 7;

// Every other parameter: some of the pages train from the beginning on.
void set_half(const torch::nn::Module& module, bool train) {
  const auto parameters = module.parameters();
  for (size_t index = 0; index < parameters.size(); index += 2) {
    torch::Tensor(parameters[index]).requires_grad_(train);
  }
}

struct Trained {
  std::vector<torch::Tensor> values;
  std::vector<double> norms;  // of the mean gradients, by step
};

// Unfreezes half of the module before step `first`, freezes it again for a step, and takes it back.
Trained trained(int ranks, const Options& options, int first) {
  Trained run;
  run_ranks(ranks, [&](comm::World& world) {
    auto module = make<Transformer>();
    set_half(*module, false);
    DistributedDataParallel<Transformer> model(module, world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model, {.loss_scaler = accumulate::LossScalerOptions::fixed(1)});
    for (int step = 0; step < kSteps; ++step) {
      if (step == first) set_half(*module, true);
      if (step == first + 2) set_half(*module, false);
      if (step == first + 3) set_half(*module, true);
      const Samples samples = samples_of(world.rank(), step);
      accumulator.backward(loss_of(model(samples.inputs).to(torch::kFloat), samples));
      const StepReport report = accumulator.step(optimizer);
      if (world.rank() == 0) run.norms.push_back(report.norm);
    }
    visit_parameters(model, [&](const std::string&, const torch::Tensor& parameter) {
      if (world.rank() == 0) run.values.push_back(parameter.clone());
    });
  });
  return run;
}

class UnfrozenParametersTest : public ::testing::TestWithParam<int> {
 protected:
  void expect_alike(Options plain) const {
    plain.stage = stage_of(GetParam());
    plain.page_bytes = 4_KiB;
    const DiskFolder folder;
    for (const int first : {0, 2}) {
      const Trained expected = trained(2, plain, first);
      for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
        Options options = plain;
        if (tier == Tier::kNvme) options.offload.nvme_directory = folder.path();
        options.offload.optimizer = tier;
        if (GetParam() == 3) options.offload.parameters = tier;
        for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
          SCOPED_TRACE(c10::str("from step ", first, ", ", name(tier), ", ",
                                when == StepWhen::kInStep ? "in step()" : "in backward"));
          options.offload.step = when;
          const Trained run = trained(2, options, first);
          EXPECT_TRUE(same_bits(expected.values, run.values));
          EXPECT_EQ(expected.norms, run.norms);
        }
      }
    }
  }
};

TEST_P(UnfrozenParametersTest, TrainAsOnTheDeviceWhereverTheyLie) {
  expect_alike({});
}

TEST_P(UnfrozenParametersTest, InBfloat16TrainAsOnTheDeviceWhereverTheyLie) {
  Options options;
  options.compute_dtype = torch::kBFloat16;
  expect_alike(options);
}

enum class Resumes : uint8_t { kNever, kBeforeItFreezes, kFrozen };

// Three steps of all, one with half frozen, two of all. Resumes before the fourth, and saves and loads once more before the fifth.
std::vector<torch::Tensor> resumed(int stage, Resumes resumes, const std::string& path) {
  std::vector<torch::Tensor> result;
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  run_ranks(2, [&](comm::World& world) {
    auto module = make<Transformer>();
    set_half(*module, resumes != Resumes::kFrozen);
    DistributedDataParallel<Transformer> model(module, world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    const auto step = [&](int count) {
      const Samples samples = samples_of(world.rank(), count);
      optimizer.zero_grad();
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
    };
    if (resumes == Resumes::kNever) {
      for (int count = 0; count < 3; ++count) step(count);
      save_state(path, model, optimizer);
    } else {
      load_state(path, model, optimizer);
    }
    set_half(*module, false);
    step(3);
    if (resumes != Resumes::kNever) {
      const std::string again = path + (resumes == Resumes::kFrozen ? "-frozen" : "-trained");
      save_state(again, model, optimizer);
      load_state(again, model, optimizer);
    }
    set_half(*module, true);
    for (int count = 4; count < 6; ++count) step(count);
    visit_parameters(model, [&](const std::string&, const torch::Tensor& parameter) {
      if (world.rank() == 0) result.push_back(parameter.clone());
    });
  });
  return result;
}

TEST_P(UnfrozenParametersTest, KeepStatesThatWereLoadedWhileTheyWereFrozen) {
  const DiskFolder folder;
  const std::string path = folder.path() + "/state";
  const auto expected = resumed(GetParam(), Resumes::kNever, path);
  EXPECT_TRUE(same_bits(expected, resumed(GetParam(), Resumes::kBeforeItFreezes, path)));
  EXPECT_TRUE(same_bits(expected, resumed(GetParam(), Resumes::kFrozen, path)));
  expect_same_files(path + "-trained", path + "-frozen");
}

INSTANTIATE_TEST_SUITE_P(Stages, UnfrozenParametersTest, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace zeropage::unfrozen_parameters_test
