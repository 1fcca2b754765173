// Runs a torch::optim class on what this rank owns of each page, then shares the result.
//
// It is a torch::optim::Optimizer whose parameters and options are the user's: schedulers,
// per-group options and add_param_group work on it as on any other. Inside, each page has an
// optimizer of class A over the slices of its parameters that this rank owns, one slice a
// parameter, so that state exists once over all ranks. While page k + 1 is stepped, page k's new
// values travel.
//
// Lifetime: shares the pages and the reducer with the DataParallel that made them; either may go
// first.
// Threads: the training thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "zero/sharded_parameters.h"

namespace zeropage {

class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  // Collective. Averages gradients that backward has not averaged yet, updates what this rank owns,
  // and returns when all whole parameters are new on this rank; sharded ones come when they are
  // used. Returns the closure's loss, or an undefined tensor.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Sharded state is not one archive; both throw.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;

  // class_name: of A, for errors and for comparing ranks.
  // Collective: ranks must agree on groups and options.
  ShardedOptimizer(ShardedParameters parameters, const Groups& groups,
                   std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                   std::string class_name);

 private:
  // A stretch of what this rank owns of one parameter.
  struct Slice {
    size_t parameter;
    at::Tensor values;    // [numel], of what this rank owns of the page
    at::Tensor gradient;  // [numel], the same of its gradient
  };
  struct PageOptimizer {
    size_t page;
    std::vector<Slice> slices;
    std::unique_ptr<torch::optim::Optimizer> optimizer;  // of class A; its groups mirror ours
  };

  void check_agreement() const;
  void adopt_groups();
  std::vector<size_t> parameters_of_group(size_t group) const;
  torch::optim::OptimizerParamGroup mirror(PageOptimizer& of_page, size_t group,
                                           const std::vector<size_t>& parameters);
  void take_over_options(PageOptimizer& of_page) const;
  void note_changes() const;

  const ShardedParameters parameters_;
  const Factory factory_;
  const std::string class_name_;
  std::vector<PageOptimizer> page_optimizers_;
  std::vector<bool> grouped_;  // by parameter: is in a group
  size_t adopted_groups_ = 0;
};

}  // namespace zeropage
