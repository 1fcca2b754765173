// `Adafactor`, an optimizer whose states take next to no memory, that LibTorch does not have in C++.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zeropage/detail/optimizer_traits.h"

namespace zeropage {

struct AdafactorOptions : public torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  using eps_t = std::tuple<double, double>;

  AdafactorOptions(double lr = 1e-2);  // implicit, as torch::optim's options are

  // At least 0. A step is at most min(lr, 1 / sqrt(step)) times the parameter's root mean square long, by element in the mean.
  TORCH_ARG(double, lr) = 1e-2;
  // At most 0: moments move by step^beta2_decay.
  TORCH_ARG(double, beta2_decay) = -0.8;
  // The least root of a second moment, and the least root mean square of a parameter; each at least 0.
  TORCH_ARG(eps_t, eps) = std::make_tuple(1.1920928955078125e-7, 1e-3);
  // The largest root mean square of a direction; at least 1.
  TORCH_ARG(double, d) = 1;
  // Decoupled: a value is multiplied by 1 - lr weight_decay; at least 0.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

  friend bool operator==(const AdafactorOptions& one, const AdafactorOptions& other);
};

// Throws unless the options are in range.
void check_options(const AdafactorOptions& options);

// The optimizer Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5) as a class of torch::optim, with the formulas,
// defaults and names of PyTorch's torch.optim.Adafactor. A parameter of two dimensions or more, [..., m, n]:
//
//   row_var [..., m, 1], col_var [..., 1, n] = moving means of the gradient's squares over a row, over a column
//   direction = gradient / sqrt(row_var col_var / mean of row_var)
//   value = value - min(lr, 1 / sqrt(step)) max(eps2, rms of values) / max(1, rms of directions / d) direction
//
// Others have `variance`, a moment for each element. There is no momentum.
//
// Sharded, the means over rows and columns are made over all ranks, and each rank that has a part of a matrix has all of its m + n
// moments; so a parameter's bits do not depend on how it is cut. Parameters of two dimensions or more must be contiguous. Other
// parameters and threads: as zeropage::Muon's. Throws c10::Error on options out of range and on sparse gradients.
class Adafactor : public torch::optim::Optimizer {
 public:
  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const AdafactorOptions& defaults = {});
  explicit Adafactor(std::vector<torch::Tensor> parameters, const AdafactorOptions& defaults = {})
      : Adafactor({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  // Steps parameters that have a gradient. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

template <>
struct OptimizerTraits<Adafactor> {
  using Options = AdafactorOptions;
  static constexpr UpdateReads kReads = UpdateReads::kSums;
};

}  // namespace zeropage
