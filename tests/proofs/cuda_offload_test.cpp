// Training on a CUDA device with what the optimizer or autograd keeps away from it: the bits of the
// same run where all stays.
#include <filesystem>
#include <memory>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "offload/nvme_heap.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/needs_cuda.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zeropage/activation_offload.h"
#include "zeropage/bytes.h"
#include "zeropage/zeropage.h"

namespace zeropage::cuda_offload_test {
namespace {

using namespace zeropage::testing;
using memory::Tier;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kSteps = 3;

// Every layer is a page of its own. [batch, 7] -> [batch, 7]
struct PagedLayersImpl : torch::nn::Module {
  PagedLayersImpl() {
    for (const auto& [from, to] : {std::pair(7, 64), {64, 64}, {64, 64}, {64, 7}}) {
      layers->push_back(torch::nn::Linear(from, to));
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(PagedLayers);

PagedLayers layers_on(c10::Device device) {
  torch::manual_seed(7);
  PagedLayers module;
  module->to(device);
  return module;
}

Samples samples_at(c10::Device device, int step) {
  const Samples samples = samples_of(/*rank=*/0, step);
  return {samples.inputs.to(device), samples.targets.to(device)};
}

Options options_of(int stage, at::ScalarType compute) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  if (compute != at::kFloat) options.compute_dtype = compute;
  return options;
}

// A rank that trains; its parameters afterwards, on the host.
std::vector<torch::Tensor> trained(const Options& options) {
  std::vector<torch::Tensor> values;
  const auto train = [&](comm::World& world) {
    DistributedDataParallel<PagedLayers> model(layers_on(world.device()), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    for (int step = 0; step < kSteps; ++step) {
      const Samples samples = samples_at(world.device(), step);
      optimizer.zero_grad();
      loss_of(model(samples.inputs).to(at::kFloat), samples).backward();
      optimizer.step();
    }
    visit_parameters(model, [&](const std::string&, const torch::Tensor& parameter) {
      values.push_back(parameter.detach().cpu().clone());
    });
  };
  run_ranks(1, train, {.device = c10::kCUDA});
  return values;
}

// By the stage and the dtype of compute.
class CudaOffloadTest
    : public NeedsCuda<::testing::TestWithParam<std::tuple<int, at::ScalarType>>> {
 protected:
  Options options() const { return options_of(std::get<0>(GetParam()), std::get<1>(GetParam())); }

  // With the optimizer on that tier, and with the parameters too where they are sharded.
  void expect_the_bits_without_offload(Tier tier) const {
    const DiskFolder folder;
    const auto expected = trained(options());
    ASSERT_FALSE(expected.empty());
    for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
      for (const Tier parameters : {Tier::kDevice, tier}) {
        if (parameters != Tier::kDevice && std::get<0>(GetParam()) != 3) continue;
        Options away = options();
        away.offload.optimizer = tier;
        away.offload.parameters = parameters;
        away.offload.step = when;
        if (tier == Tier::kNvme) away.offload.nvme_directory = folder.path();
        EXPECT_TRUE(same_bits(expected, trained(away)))
            << "step " << static_cast<int>(when) << ", parameters on " << memory::name(parameters);
      }
    }
  }
};

TEST_P(CudaOffloadTest, ToTheHostHasTheBitsOfARunWithout) {
  expect_the_bits_without_offload(Tier::kHost);
}

TEST_P(CudaOffloadTest, ToNvmeHasTheBitsOfARunWithout) {
  expect_the_bits_without_offload(Tier::kNvme);
}

INSTANTIATE_TEST_SUITE_P(StagesDtypes, CudaOffloadTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return c10::str("Stage", std::get<0>(info.param),
                                           c10::toString(std::get<1>(info.param)));
                         });

class CudaActivationOffloadTest : public NeedsCuda<> {
 protected:
  // The gradients of some steps, on the host.
  static std::vector<torch::Tensor> gradients_with(
      const std::shared_ptr<checkpointing::SavedTensorHooks>& hooks) {
    const c10::Device device(c10::kCUDA, 0);
    PagedLayers module = layers_on(device);
    std::vector<torch::Tensor> gradients;
    for (int step = 0; step < kSteps; ++step) {
      const Samples samples = samples_at(device, step);
      module->zero_grad();
      torch::Tensor loss;
      {
        const checkpointing::SavedTensorScope scope(hooks);
        loss = loss_of(module->forward(samples.inputs), samples);
      }
      loss.backward();
      for (const auto& parameter : module->parameters()) {
        gradients.push_back(parameter.grad().cpu());
      }
    }
    return gradients;
  }

  static void expect_the_gradients_without(const checkpointing::ActivationOffloadOptions& options) {
    const checkpointing::ActivationOffload offload(options);
    EXPECT_TRUE(same_bits(gradients_with(nullptr), gradients_with(offload.hooks())));
    EXPECT_GT(offload.statistics().copies, 0);
    EXPECT_EQ(offload.statistics().host_bytes, 0);
  }
};

TEST_F(CudaActivationOffloadTest, ToTheHostHasTheGradientsOfARunWithout) {
  // A bound that brings back all but the last, and one under which most stay till they are needed.
  for (const int64_t staging_bytes : {1_KiB, 256_KiB}) {
    expect_the_gradients_without({.least_bytes = 0, .staging_bytes = staging_bytes});
  }
}

TEST_F(CudaActivationOffloadTest, ToNvmeHasTheGradientsOfARunWithout) {
  const DiskFolder folder;
  const auto disk = std::make_shared<NvmeActivations>(
      NvmeActivationsOptions{.directory = folder.path(), .rank = static_cast<int>(::getpid())});
  expect_the_gradients_without({.least_bytes = 0, .staging_bytes = 1_KiB, .store = disk});
  EXPECT_GT(disk->heap().statistics().records_read, 0);
}

}  // namespace
}  // namespace zeropage::cuda_offload_test
