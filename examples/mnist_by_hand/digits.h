// What both programs have in common: flags, the data of each rank, and what is printed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <zeropage/data/labelled_images.h>
#include <zeropage/zeropage.h>

namespace mnist {

struct Flags {
  std::string data = "datasets/mnist-5k/mnist_5k.csv.gz";
  int ranks = 2;
  int64_t epochs = 20;
  int64_t batch = 128;  // of all ranks together
  int64_t held_out = 1000;
  double learning_rate = 0.05;
  double momentum = 0.9;
  uint64_t seed = 1234;
};

// The digits of one rank: its part of the training set, and all that are held out.
struct Digits {
  zeropage::data::LabelledImages training;
  zeropage::data::LabelledImages held_out;
};

// All ranks read the same file, and divide it alike. Parts are equal, so that ranks have as many batches.
Digits read_digits(const Flags& flags, const zeropage::World& world);

struct Batch {
  torch::Tensor images;  // [batch, 1, 28, 28] fp32, mean 0 and deviation 1 over all of MNIST
  torch::Tensor labels;  // [batch] int64
};
Batch batch_of(const zeropage::data::LabelledImages& images, const std::vector<int64_t>& samples);

// The share of the held-out digits that all ranks together name rightly. forward: of the network, called as
// often on all ranks; each digit counts once.
double accuracy(const Digits& digits, const zeropage::World& world,
                const std::function<torch::Tensor(const torch::Tensor&)>& forward);

// On rank 0.
void print_epoch(const zeropage::World& world, const Flags& flags, int64_t epoch, double loss);
void print_result(const zeropage::World& world, double accuracy,
                  const std::vector<torch::Tensor>& weights);

// Reads the flags, starts the ranks unless a launcher did, and returns what main() returns.
int run(int argc, char** argv, const std::function<void(const Flags&, zeropage::World&)>& train);

}  // namespace mnist
