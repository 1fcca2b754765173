// What runs a script: LibTorch alone in double, or this library. Both do what the script says by the calls that a
// user would write; they differ where a user writes something else.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tests/scripts/composed_module.h"
#include "tests/scripts/script.h"
#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/muon.h"

namespace zeropage::scripts {

constexpr double kDecay = 0.75;  // of the average

// What is compared between the sides: copies on the host, in double.
struct Observation {
  std::string what;  // "action 7, step: u3.weight"
  torch::Tensor value;
};
using Observations = std::vector<Observation>;

// Options of the script's rule for a group of its parameters.
std::vector<torch::optim::OptimizerParamGroup> groups_of(
    const Script& script, const std::vector<torch::Tensor>& parameters);

// Those of each optimizer when it is made, and those that come to the first one later.
std::vector<std::vector<torch::Tensor>> parameters_of_optimizers(
    const Script& script, const std::vector<torch::Tensor>& parameters);
std::vector<torch::Tensor> left_out_of(const Script& script,
                                       const std::vector<torch::Tensor>& parameters);

// Each tensor once, in the order of their first names.
std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& tensors);

// Calls make with a null pointer to the class of the rule, and its options.
template <typename Make>
auto with_rule(Rule rule, const Make& make) {
  using namespace torch::optim;
  switch (rule) {
    case Rule::kSgd:
      return make(static_cast<SGD*>(nullptr), SGDOptions(0.05).momentum(0.9));
    // A large eps, as where a gradient is noise, so would be the update.
    case Rule::kAdam:
      return make(static_cast<Adam*>(nullptr), AdamOptions(0.02).eps(0.05));
    case Rule::kAdamW:
      return make(static_cast<AdamW*>(nullptr), AdamWOptions(0.02).eps(0.05));
    case Rule::kAdagrad:
      return make(static_cast<Adagrad*>(nullptr), AdagradOptions(0.05).eps(0.05));
    case Rule::kLamb:
      return make(static_cast<Lamb*>(nullptr), LambOptions(0.02).eps(0.05));
    case Rule::kAdafactor:
      return make(static_cast<Adafactor*>(nullptr), AdafactorOptions(0.02).eps({0.02, 1e-3}));
    case Rule::kMuon:
      return make(static_cast<Muon*>(nullptr), MuonOptions(0.02).ns_eps(0.05).eps(0.05));
  }
  throw std::logic_error("no such rule");
}

class Side {
 public:
  virtual ~Side() = default;
  // Does the actions up to, and without, the next kResume from `first` on. Returns where it ended.
  size_t run(size_t first);

 protected:
  Side(const Script& script, const Setting& setting) : script_(script), setting_(setting) {}

  // Returns whether it was run: a loss may need no gradient.
  virtual bool backward(const Action& action, bool syncs) = 0;
  // One of the accumulator's, or several. units: that are used.
  virtual void micro_batches(int count, int units) = 0;
  virtual void accumulated_step() = 0;
  virtual void abandon() = 0;
  // Before the script looks at gradients between an accumulation's last backward and its step: they are the mean then.
  virtual void look_at_mean() = 0;
  virtual void throw_in_forward(int unit) = 0;
  // Undefined where other ranks have the outputs.
  virtual torch::Tensor evaluate() = 0;
  virtual double clip(double most, bool by_torch) = 0;
  virtual void write_guarded(torch::Tensor parameter, double factor) = 0;
  virtual void write_alike(torch::Tensor parameter, double factor) = 0;
  virtual void see_values() = 0;
  virtual void average() = 0;
  // What an evaluation with the average gives.
  virtual torch::Tensor evaluate_average() = 0;
  // What each rank sets a gradient to that no backward gave, or its mean over the ranks. A twin that is one rank has no
  // others, so that all ranks of such a script set the same, to so few digits that their sum is exact.
  double own_value(double value) const {
    // Ranks that have other experts have no mean of theirs.
    if (spreads_experts(script_)) return value;
    return script_.is_world_invariant ? std::round(value * 64) / 64 : value * share_of_own_value();
  }
  // 1 + rank of `data`, or its mean over the ranks.
  virtual double share_of_own_value() const = 0;
  // Moves the biases of experts, after a step.
  virtual void update_balance() = 0;
  // Whether this is the rank that does what it should not do alone.
  virtual bool is_odd_one() const = 0;
  // Gradients were just zeroed, to none.
  virtual void after_zero_grad() {}

  void see(const std::string& what, const torch::Tensor& value);
  int units_of(const Action& action) const;
  torch::Tensor parameter(int which) const;
  // The open step's micro-batches from here on, until it is made or dropped.
  int micro_batches_ahead() const;
  // The optimizers are others from here on.
  void drop_schedules() { schedules_.clear(); }
  // Each optimizer's step.
  virtual void step_optimizers();
  double weight_of(int pass, int rank) const;
  // What the loss is multiplied by.
  double factor_of(int pass, int rank) const;
  // What an accumulator's step told.
  void see_step(bool is_made, double norm);
  // In the script's module of this side, each once.
  std::vector<torch::Tensor> parameters() const { return distinct(module_->parameters()); }

  const Script& script_;
  Setting setting_;  // of now
  std::shared_ptr<ComposedModule> module_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  int pass_ = 0;
  Observations seen_;

 private:
  // Schedulers of an optimizer, from their first steps on.
  struct Schedules {
    std::unique_ptr<torch::optim::StepLR> steps;
    std::unique_ptr<torch::optim::ReduceLROnPlateauScheduler> plateau;
  };

  void act(const Action& action);
  void schedule(const Action& action);
  void add_group();
  void step();
  void end_accumulation();
  std::vector<Schedules> schedules_;  // by optimizer
  size_t at_ = 0;
  bool has_added_group_ = false;
  int made_ = 0;            // micro-batches of the step that is open
  int infinite_pass_ = -1;  // whose loss is infinite
  // Since gradients were zeroed last: one was dropped; one is each rank's own until the step averages it.
  bool has_dropped_ = false;
  bool has_own_ = false;
  // All are each rank's own, since the last backward did not average them.
  bool waits_for_average_ = false;
};

}  // namespace zeropage::scripts
