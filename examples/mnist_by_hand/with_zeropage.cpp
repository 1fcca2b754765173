// The same with Zeropage, at ZeRO's stage 3: each rank keeps its part of weights, gradients and momentum.
#include <zeropage/data/distributed_sampler.h>

#include "mnist_by_hand/convnet.h"
#include "mnist_by_hand/digits.h"

namespace mnist {

void train(const Flags& flags, zeropage::World& world) {
  const Digits digits = read_digits(flags, world);
  torch::manual_seed(flags.seed);  // the same weights on all ranks
  zeropage::Options options;
  options.stage = zeropage::Stage::kParameters;
  options.update_by = zeropage::UpdateBy::kClass;  // the bits of torch::optim::SGD
  zeropage::DistributedDataParallel<Net> net(Net(), world, options);
  zeropage::Optimizer<torch::optim::SGD> optimizer(
      net, torch::optim::SGDOptions(flags.learning_rate).momentum(flags.momentum));

  zeropage::data::DistributedSampler sampler(
      digits.training.size(), {.batch = flags.batch / world.size(), .seed = flags.seed});
  for (int64_t epoch = 0; epoch < flags.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    double loss_sum = 0;
    while (const auto samples = sampler.next()) {
      const Batch batch = batch_of(digits.training, *samples);
      optimizer.zero_grad();
      const torch::Tensor loss = torch::nll_loss(net(batch.images), batch.labels);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>();
    }
    print_epoch(world, flags, epoch, loss_sum / static_cast<double>(sampler.batches()));
  }

  net.eval();
  const double right = accuracy(digits, world, [&](const auto& images) { return net(images); });
  const zeropage::GatheredParameters whole(net);
  print_result(world, right, net.parameters());
}

}  // namespace mnist

int main(int argc, char** argv) {
  return mnist::run(argc, argv, mnist::train);
}
