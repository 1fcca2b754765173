#include "model_parallel/training.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include <zeropage/pipeline.h>

#include "image_models/resnet.h"
#include "model_parallel/layers.h"

namespace model_parallel {
namespace {

using image_models::ResNet;
using Clock = std::chrono::steady_clock;

constexpr double kLearningRate = 0.05;

struct Batch {
  torch::Tensor images;  // [batch, 3, side, side]
  torch::Tensor labels;  // [batch]
};

// Random images: only the time counts. Every rank makes the same.
Batch batch_for(const Flags& flags) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(flags.seed + 1);
  return {torch::randn({flags.batch, 3, flags.image_side, flags.image_side}, generator),
          torch::randint(flags.classes, {flags.batch}, generator)};
}

ResNet made_alike(const Flags& flags) {
  torch::manual_seed(flags.seed);
  return ResNet(image_models::ResNetOptions::resnet50(
      {.classes = flags.classes, .image_side = flags.image_side, .width = flags.width}));
}

struct Measured {
  double seconds = 0;  // of all measured steps
  double loss = 0;     // of the last
};

// One step that is not measured, and those that are. step: returns the loss.
Measured measure_steps(const Flags& flags, const std::function<double()>& step) {
  Measured measured{.seconds = 0, .loss = step()};
  const auto begin = Clock::now();
  for (int64_t i = 0; i < flags.steps; ++i) measured.loss = step();
  measured.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return measured;
}

// The whole model on one rank.
Measured train_on_one(const Flags& flags, const zeropage::World& alone, const Batch& batch) {
  zeropage::DistributedDataParallel<ResNet> model(made_alike(flags), alone, zeropage::Options{});
  zeropage::Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(kLearningRate));
  return measure_steps(flags, [&] {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::cross_entropy_loss(model(batch.images), batch.labels);
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  });
}

// Cut over all ranks. With the whole batch as the only micro-batch a rank computes while the others wait.
Measured train_cut(const Flags& flags, const zeropage::World& world, const Batch& batch,
                   int64_t split_size) {
  const bool is_naive = split_size == flags.batch;
  const zeropage::Mesh mesh(world, {{"pipeline", world.size()}, {"data", 1}});
  const auto stage = zeropage::pipeline_stage<ResNet>([&] { return made_alike(flags); }, layers_of,
                                                      mesh["pipeline"]);
  zeropage::Pipeline::Model model(stage, mesh, zeropage::Options{});
  zeropage::Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(kLearningRate));
  zeropage::PipelineOptions options;
  if (!is_naive) options.schedule = flags.schedule;
  if (is_naive) options.schedule = zeropage::parallel::ScheduleKind::kGPipe;
  options.accumulator.micro_steps = flags.batch / split_size;
  zeropage::Pipeline pipeline(model, options);
  const std::vector<torch::Tensor> images = batch.images.split(split_size);
  const std::vector<torch::Tensor> labels = batch.labels.split(split_size);
  return measure_steps(flags, [&] {
    pipeline.run(images, [&](const torch::Tensor& output, int64_t micro_batch) {
      return torch::cross_entropy_loss(output, labels[static_cast<size_t>(micro_batch)]);
    });
    pipeline.accumulator().step(optimizer);
    return pipeline.loss().item<double>();
  });
}

std::vector<WayFigures> ways_of(const Flags& flags) {
  std::vector<WayFigures> ways(2);
  ways[0] = {.way = "single", .split_size = flags.batch};
  ways[1] = {.way = "naive", .split_size = flags.batch};
  for (const int64_t split : flags.split_sizes) {
    ways.push_back({.way = "split " + std::to_string(split), .split_size = split});
  }
  return ways;
}

void measure_way(const Flags& flags, zeropage::World& world, const zeropage::World& alone,
                 const Batch& batch, WayFigures& way) {
  const auto ledger = zeropage::memory::Ledger::current();
  ledger->reset_peak();
  world.sum(0.0);  // all ranks are here
  Measured measured;
  if (way.way != "single") {
    measured = train_cut(flags, world, batch, way.split_size);
  } else if (world.rank() == 0) {
    measured = train_on_one(flags, alone, batch);
  }
  const auto memory = zeropage::memory_report(world);
  for (const auto& rank : memory.ranks)
    way.peak_bytes = std::max(way.peak_bytes, rank.at_peak.total());
  way.images_per_second.push_back(static_cast<double>(flags.batch * flags.steps) /
                                  measured.seconds);
  way.loss = measured.loss;
}

}  // namespace

Figures measure(const Flags& flags, zeropage::World& world) {
  const zeropage::World alone = world.split(/*color=*/world.rank(), /*key=*/0);
  const Batch batch = batch_for(flags);
  Figures figures{.name = "Zeropage",
                  .ranks = world.size(),
                  .batch = flags.batch,
                  .image_side = flags.image_side,
                  .width = flags.width,
                  .ways = ways_of(flags)};
  for (int round = 0; round < flags.rounds; ++round) {
    for (size_t turn = 0; turn < figures.ways.size(); ++turn) {
      const size_t way = round % 2 == 0 ? turn : figures.ways.size() - 1 - turn;
      measure_way(flags, world, alone, batch, figures.ways[way]);
    }
  }
  return figures;
}

}  // namespace model_parallel
