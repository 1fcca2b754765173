// A unit that is a mixture of experts: by the library's layer, and by LibTorch's operators alone.
#pragma once

#include <torch/torch.h>

#include "tests/scripts/script.h"
#include "zeropage/experts.h"
#include "zeropage/world.h"

namespace zeropage::scripts {

class ExpertUnit {
 public:
  // kind: kExperts, kSigmoidExperts or kTightExperts.
  explicit ExpertUnit(Kind kind);
  const parallel::Experts& layer() const { return layer_; }

  // x: [rows, width]. pass and rank: by which kTightExperts takes some of the rows in training, or none.
  torch::Tensor forward(const torch::Tensor& x, int pass, int rank, bool is_plain);

  // What forwards have added since the last call; undefined where the kind adds nothing, or its forward has taken it.
  torch::Tensor auxiliary_loss(bool is_plain);
  // After a step. world: whose tokens count; null: one rank's, which is all.
  void update_balance(const comm::World* world);
  // A run that resumes has not seen the tokens since the last step.
  void forget_load() { load_ = torch::Tensor(); }

 private:
  torch::Tensor plainly(const torch::Tensor& x);
  torch::Tensor plain_expert(const torch::Tensor& x, int64_t expert) const;
  torch::Tensor of_rows(const torch::Tensor& x, bool is_plain) {
    return is_plain ? plainly(x) : layer_->forward(x);
  }
  torch::Tensor taken_loss(bool is_plain);

  const Kind kind_;
  parallel::Experts layer_;
  // The plain side's: choices of each expert, [experts], and losses that are not taken; undefined: none.
  torch::Tensor load_;
  torch::Tensor loss_;
};

}  // namespace zeropage::scripts
