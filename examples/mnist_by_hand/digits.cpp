#include "mnist_by_hand/digits.h"

#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>

#include <CLI/CLI.hpp>
#include <zeropage/check.h>
#include <zeropage/data/data_partitioner.h>
#include <zeropage/data/distributed_sampler.h>

#include "command_line/command_line.h"
#include "progress/words.h"
#include "weights_hash/weights_hash.h"

namespace mnist {

namespace data = zeropage::data;

namespace {

constexpr double kMean = 0.1307;
constexpr double kDeviation = 0.3081;
constexpr int64_t kEvaluationBatch = 250;

}  // namespace

Digits read_digits(const Flags& flags, const zeropage::World& world) {
  const auto all = data::read_csv_images(flags.data, {1, 28, 28});
  const auto split = data::stratified_split(all.labels, flags.held_out, flags.seed);
  const auto training = all.of(split.training);
  const int64_t shared = training.size() - training.size() % world.size();
  const auto parts = data::DataPartitioner::equal(shared, world.size(), flags.seed);
  return {training.of(parts.use(world.rank())), all.of(split.held_out)};
}

Batch batch_of(const data::LabelledImages& images, const std::vector<int64_t>& samples) {
  const auto chosen = images.of(samples);
  return {chosen.images.to(torch::kFloat).div_(255).sub_(kMean).div_(kDeviation), chosen.labels};
}

double accuracy(const Digits& digits, const zeropage::World& world,
                const std::function<torch::Tensor(const torch::Tensor&)>& forward) {
  const torch::NoGradGuard no_grad;
  data::DistributedSampler sampler(digits.held_out.size(), {.rank = world.rank(),
                                                            .ranks = world.size(),
                                                            .batch = kEvaluationBatch,
                                                            .order = data::Order::kAsTheyAre});
  int64_t right = 0;
  while (const auto samples = sampler.next()) {
    const Batch batch = batch_of(digits.held_out, *samples);
    right += forward(batch.images).argmax(1).eq(batch.labels).sum().item<int64_t>();
  }
  return world.sum(static_cast<double>(right)) / static_cast<double>(digits.held_out.size());
}

void print_epoch(const zeropage::World& world, const Flags& flags, int64_t epoch, double loss) {
  const double of_all = world.mean(loss);
  if (world.rank() != 0) return;
  std::printf("epoch [%2ld/%ld] loss %s\n", static_cast<long>(epoch + 1),
              static_cast<long>(flags.epochs), examples::fixed(of_all, 6).c_str());
}

void print_result(const zeropage::World& world, double accuracy,
                  const std::vector<torch::Tensor>& weights) {
  if (world.rank() != 0) return;
  train_gpt::WeightsHash hash;
  for (const torch::Tensor& weight : weights) hash.add(weight.detach());
  std::printf("held-out accuracy %.2f %%\nweights_sha256 %s\n", 100 * accuracy, hash.hex().c_str());
}

int run(int argc, char** argv, const std::function<void(const Flags&, zeropage::World&)>& train) {
  Flags flags;
  CLI::App app("MNIST on several ranks");
  app.add_option("--data", flags.data, "CSV, gzipped or not: 784 pixels a line and the label last")
      ->capture_default_str();
  app.add_option("--ranks", flags.ranks, "Local ranks to start, unless a launcher did")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--epochs", flags.epochs)->check(examples::positive())->capture_default_str();
  app.add_option("--batch", flags.batch, "Samples of a step, over all ranks")
      ->check(examples::positive())
      ->capture_default_str();
  app.add_option("--held-out", flags.held_out, "Digits that are not trained on")
      ->check(examples::positive())
      ->capture_default_str();
  app.add_option("--lr", flags.learning_rate)->check(examples::positive())->capture_default_str();
  app.add_option("--momentum", flags.momentum)->check(CLI::Range(0.0, 1.0))->capture_default_str();
  app.add_option("--seed", flags.seed)->capture_default_str();
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) return *ended;
  const auto on_rank = [&](zeropage::World& world) {
    ZP_CHECK(flags.batch % world.size() == 0, "--batch ", flags.batch, " cannot be shared by ",
             world.size(), " ranks; give a multiple of ", world.size());
    torch::set_num_threads(1);
    train(flags, world);
    return 0;
  };
  try {
    if (!zeropage::launched_by_environment()) return zeropage::World::launch(flags.ranks, on_rank);
    auto world = zeropage::World::from_environment();
    return on_rank(world);
  } catch (const std::exception& error) {
    std::cerr << zeropage::message_of(error) << '\n';
    return 1;
  }
}

}  // namespace mnist
