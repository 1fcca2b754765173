// MNIST with data parallelism written by hand, after PyTorch's tutorial "Writing distributed applications".
#include <zeropage/data/distributed_sampler.h>

#include "mnist_by_hand/convnet.h"
#include "mnist_by_hand/digits.h"

namespace mnist {

// Every rank's gradients become the mean of all ranks'.
void average_gradients(const Net& net, const zeropage::World& world) {
  for (const torch::Tensor& parameter : net->parameters()) {
    const torch::Tensor gradient = parameter.grad().view(-1);
    world.communicator().all_reduce(gradient, zeropage::comm::ReduceOp::kSum, "gradient").wait();
    gradient.div_(world.size());
  }
}

void train(const Flags& flags, zeropage::World& world) {
  const Digits digits = read_digits(flags, world);
  torch::manual_seed(flags.seed);  // the same weights on all ranks
  Net net;
  torch::optim::SGD optimizer(
      net->parameters(), torch::optim::SGDOptions(flags.learning_rate).momentum(flags.momentum));

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
      average_gradients(net, world);
      optimizer.step();
      loss_sum += loss.item<double>();
    }
    print_epoch(world, flags, epoch, loss_sum / static_cast<double>(sampler.batches()));
  }

  net->eval();
  const double right = accuracy(digits, world, [&](const auto& images) { return net(images); });
  print_result(world, right, net->parameters());
}

}  // namespace mnist

int main(int argc, char** argv) {
  return mnist::run(argc, argv, mnist::train);
}
