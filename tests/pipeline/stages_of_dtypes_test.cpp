// Stages of a pipeline whose parameters have other dtypes.
#include <mutex>

#include <gtest/gtest.h>

#include "tests/pipeline/pipeline_models.h"

namespace zeropage::stages_of_dtypes_test {
namespace {

using namespace zeropage::pipeline_models;
using testing::run_ranks;

TEST(StagesOfDtypesTest, AddsUpAlikeWhereOneStageAloneHasGradientsInHalves) {
  Shape shape{.data = 2, .low_precision = true};
  // The embedding stays fp32, and is alone on the first stage.
  const auto options = [&] {
    Options of_run = options_of(shape);
    of_run.compute_dtype = torch::kHalf;
    of_run.stays_fp32 = ModuleSelection::of_type<torch::nn::EmbeddingImpl>();
    return of_run;
  };
  const auto layers = [](Model& model) {
    PipelineLayers of_model = layers_of_model(model);
    of_model.front().forward = [model](const torch::Tensor& tokens) mutable {
      return model->embedding(tokens).to(torch::kHalf);
    };
    return of_model;
  };
  double expected = 0;
  std::mutex construction;
  run_ranks(shape.data, [&](World& world) {
    Model module{nullptr};
    {
      const std::lock_guard lock(construction);
      module = Model(shape.head, shape.dtype());
    }
    DistributedDataParallel<Model> model(module, world, options());
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
    Accumulator accumulator(model, accumulator_of(shape));
    for (int micro_batch = 0; micro_batch < shape.micro_batches; ++micro_batch) {
      const int64_t sample = sample_of(shape, 0, micro_batch, world.rank());
      torch::Tensor x = model->embedding(tokens_of(sample)).to(torch::kHalf);
      for (const auto& block : *model->blocks) x = block->as<Block>()->forward(x);
      accumulator.backward(loss_of(model->logits(x), sample));
    }
    const StepReport report = accumulator.step(optimizer);
    if (world.rank() == 0) expected = report.norm;
  });
  shape.pipeline = 2;
  std::vector<double> norms(static_cast<size_t>(shape.ranks()));
  run_ranks(shape.ranks(), [&](World& world) {
    const Mesh mesh(world, {{"pipeline", 2}, {"data", 2}});
    Pipeline::Model model(pipeline_stage<Model>([&] { return Model(shape.head, shape.dtype()); },
                                                layers, mesh["pipeline"], {.first_layers = {0, 1}}),
                          mesh, options());
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
    Pipeline pipeline(model, {.accumulator = accumulator_of(shape)});
    std::vector<torch::Tensor> inputs;
    const auto sample = [&](int64_t micro_batch) {
      return sample_of(shape, 0, micro_batch, mesh["data"].rank());
    };
    for (int64_t index = 0; index < shape.micro_batches; ++index) {
      inputs.push_back(tokens_of(sample(index)));
    }
    pipeline.run(inputs, [&](const torch::Tensor& output, int64_t micro_batch) {
      return loss_of(output, sample(micro_batch));
    });
    norms[static_cast<size_t>(world.rank())] = pipeline.accumulator().step(optimizer).norm;
  });
  for (const double norm : norms) {
    EXPECT_EQ(norm, norms.front());
    EXPECT_NEAR(norm, expected, 1e-2 * expected);
  }
}

}  // namespace
}  // namespace zeropage::stages_of_dtypes_test
