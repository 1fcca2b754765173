// The state of a model whose layers lie on several ranks: the files that any other mesh writes and reads.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/state_files.h"
#include "tests/pipeline/pipeline_models.h"

namespace zeropage::state_over_stages_test {
namespace {

using namespace zeropage::pipeline_models;
using parallel::ScheduleKind;
using testing::expect_same_files;
using testing::run_ranks;

RunState state_of(PipelineRun& run) {
  RunState state;
  state.accumulator = &run.pipeline.accumulator();
  return state;
}

void train_and_save(const Shape& shape, int first, int steps, const std::filesystem::path& from,
                    const std::filesystem::path& to) {
  run_ranks(shape.ranks(), [&](World& world) {
    PipelineRun run(world, shape);
    RunState state = state_of(run);
    if (!from.empty()) load_state(from, run.model, run.optimizer, state);
    for (int step = first; step < first + steps; ++step) run.step(step);
    if (steps > 0) state.step = first + steps;
    check_can_save(to.parent_path(), run.model, run.optimizer);
    save_state(to, run.model, run.optimizer, state);
  });
}

// Without a pipeline.
void train_whole_and_save(const Shape& shape, int steps, const std::filesystem::path& to) {
  std::mutex construction;
  run_ranks(shape.data, [&](World& world) {
    Model module{nullptr};
    {
      const std::lock_guard lock(construction);
      module = Model(shape.head, shape.dtype());
    }
    DistributedDataParallel<Model> model(module, world, options_of(shape));
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.01));
    Accumulator accumulator(model, accumulator_of(shape));
    RunState state;
    state.accumulator = &accumulator;
    for (int step = 0; step < steps; ++step) {
      for (int micro_batch = 0; micro_batch < shape.micro_batches; ++micro_batch) {
        const int64_t sample = sample_of(shape, step, micro_batch, world.rank());
        accumulator.backward(loss_of(model(tokens_of(sample)), sample));
      }
      accumulator.step(optimizer);
    }
    save_state(to, model, optimizer, state);
  });
}

TEST(StateOverStagesTest, IsTheSameFilesFromEveryMesh) {
  for (const Head head : {Head::kOwn, Head::kTied}) {
    for (const bool low_precision : {false, true}) {
      const testing::DiskFolder folder;
      const auto path = [&](const std::string& name) {
        return std::filesystem::path(folder.path()) / name;
      };
      const auto at = [&](Shape shape) {
        shape.head = head;
        shape.low_precision = low_precision;
        return shape;
      };
      train_whole_and_save(at({.data = 4, .stage = 3}), 2, path("data"));
      // Loaded elsewhere and saved again, and back.
      train_and_save(at({.pipeline = 2, .tensor = 2, .stage = 1}), 0, 0, path("data"),
                     path("mesh"));
      expect_same_files(path("data"), path("mesh"));
      train_and_save(at({.pipeline = 2,
                         .data = 2,
                         .stage = 3,
                         .schedule = ScheduleKind::kInterleaved,
                         .chunks = 2}),
                     0, 0, path("mesh"), path("chunks"));
      expect_same_files(path("data"), path("chunks"));
      train_and_save(at({.data = 4, .stage = 2}), 0, 0, path("chunks"), path("back"));
      expect_same_files(path("data"), path("back"));
    }
  }
}

TEST(StateOverStagesTest, GoesOnWithTheBitsOfARunThatWasNotStopped) {
  const testing::DiskFolder folder;
  const auto path = [&](const std::string& name) {
    return std::filesystem::path(folder.path()) / name;
  };
  for (const int stage : {1, 3}) {
    const Shape shape{.pipeline = 2, .data = 2, .stage = stage};
    const std::string number = std::to_string(stage);
    train_and_save(shape, 0, 4, "", path("whole" + number));
    train_and_save(shape, 0, 2, "", path("half" + number));
    train_and_save(shape, 2, 2, path("half" + number), path("resumed" + number));
    expect_same_files(path("whole" + number), path("resumed" + number));
  }
}

// A table that layers of all ranks read, and parameters that the model itself registers.
struct TurnedImpl : torch::nn::Module {
  TurnedImpl() {
    torch::manual_seed(3);
    places = register_parameter("places", torch::randn({kWidth}));
    turns = register_buffer("turns", torch::randn({kWidth}));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int layer = 0; layer < 3; ++layer) layers->push_back(torch::nn::Linear(kWidth, kWidth));
  }
  torch::Tensor places, turns;
  torch::nn::ModuleList layers{nullptr};
};
TORCH_MODULE(Turned);

TEST(StateOverStagesTest, HasABufferOfSeveralRanksOnceAndGivesItToAllOfThem) {
  const testing::DiskFolder folder;
  const std::filesystem::path path = std::filesystem::path(folder.path()) / "weights";
  const auto layers_of_turned = [](Turned& turned) {
    PipelineLayers layers =
        layers_of(turned->layers, [turned](torch::nn::Module& layer, const torch::Tensor& x) {
          return layer.as<torch::nn::Linear>()->forward(x) * turned->turns;
        });
    for (PipelineLayer& layer : layers) layer.tensors = {turned->turns};
    layers.front().tensors.push_back(turned->places);
    return layers;
  };
  Turned whole;
  run_ranks(3, [&](World& world) {
    const Mesh mesh(world, {{"pipeline", 3}, {"data", 1}});
    Pipeline::Model model(
        pipeline_stage<Turned>([] { return Turned(); }, layers_of_turned, mesh["pipeline"]), mesh);
    save_weights(path, model);
    const auto buffers = model.named_buffers();
    ASSERT_TRUE(buffers.contains("turns"));
    const torch::NoGradGuard no_grad;
    buffers["turns"].zero_();
    load_weights(path, model);
    EXPECT_TRUE(torch::equal(buffers["turns"], whole->turns));
  });
  Turned loaded;
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& tensor : loaded->parameters()) tensor.zero_();
    loaded->turns.zero_();
  }
  load_weights(path, *loaded);
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(torch::equal(loaded->named_parameters()[item.key()], item.value())) << item.key();
  }
  EXPECT_TRUE(torch::equal(loaded->turns, whole->turns));
}

}  // namespace
}  // namespace zeropage::state_over_stages_test
