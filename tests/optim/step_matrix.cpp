// Steps a matrix with an optimizer of whole tensors, for tests/optim/against_torch_optim.py.
//
//   step_matrix NAME ROWS COLUMNS STEPS < numbers > numbers
//
// NAME: muon, muon-match, adafactor. It reads fp32 numbers: the matrix's, and the gradient's of each step; and writes the
// matrix's after each step. COLUMNS 0: a vector of ROWS.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include "zeropage/adafactor.h"
#include "zeropage/muon.h"

namespace {

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& name, at::Tensor value) {
  using namespace zeropage;
  const std::vector<at::Tensor> parameters = {std::move(value)};
  if (name == "muon") return std::make_unique<Muon>(parameters, MuonOptions(0.02));
  if (name == "muon-match") {
    return std::make_unique<Muon>(
        parameters,
        MuonOptions(0.01).scale(MuonScale::kMatchRmsAdamW).nesterov(false).weight_decay(0.3));
  }
  if (name == "adafactor") {
    return std::make_unique<Adafactor>(parameters, AdafactorOptions(0.03).weight_decay(0.1));
  }
  throw std::invalid_argument("no optimizer " + name);
}

void read(const at::Tensor& to) {
  const auto numel = static_cast<size_t>(to.numel());
  if (std::fread(to.data_ptr<float>(), sizeof(float), numel, stdin) != numel) {
    throw std::runtime_error("the input ends too soon");
  }
}

int run(const std::vector<std::string>& words) {
  const int64_t columns = std::stoll(words.at(2));
  std::vector<int64_t> sizes = {std::stoll(words.at(1))};
  if (columns > 0) sizes.push_back(columns);
  at::Tensor value = at::empty(sizes);
  read(value);
  value.requires_grad_();
  const auto optimizer = optimizer_of(words.at(0), value);
  value.mutable_grad() = at::empty(sizes);
  for (int64_t step = 0; step < std::stoll(words.at(3)); ++step) {
    read(value.mutable_grad());
    optimizer->step();
    std::fwrite(value.data_ptr<float>(), sizeof(float), static_cast<size_t>(value.numel()), stdout);
  }
  return EXIT_SUCCESS;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run({words + 1, words + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "step_matrix: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
