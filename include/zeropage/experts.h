// `Experts`: a mixture of experts, of which each token takes a few.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include "zeropage/detail/slices.h"

// A feed-forward layer of many experts, of which a router chooses a few for each token (Shazeer et al., "Outrageously Large
// Neural Networks", 2017; Fedus et al., "Switch Transformers", 2021).
//
//   parallel::Experts experts(parallel::ExpertsOptions(d, 4 * d, 8, 2));
//   y = experts(x);                                      // [..., d] -> [..., d]
//
// For token x with scores s = scoring(router x), the k experts of the largest scores, and their weights g:
//
//   y = sum over those experts e of g_e w_down[e] (silu(w_gate[e] x) * (w_up[e] x))
//
// The experts' weights are stacked: one tensor for each matrix of all experts. So every rank runs the same operators on the
// same parameters wherever its tokens go, at every stage of ZeRO, and an expert without tokens has a gradient of zeros, on a rank
// that has no token at all too. At stage 3 the stacked weights of a layer are gathered as a whole. zeropage/expert_parallel.h spreads the
// experts over ranks, to which tokens travel.
//
// It works in checkpointed regions, under autocast, and with parameters and inputs of low precision: the router's scores and weights
// are then computed in fp32. It works under a Recompute; under one with a budget at stage 3 where ranks have as many tokens (docs/experts.md).
//
// Threads: as a module of LibTorch. Collective: update_balance(); and where experts are spread over ranks, forward and backward. A backward with create_graph=true throws.

namespace zeropage::fused {
class RouterNotes;
}

namespace zeropage::parallel {

enum class Scoring : uint8_t {
  kSoftmax,  // over all experts (Mixtral, Qwen)
  kSigmoid,  // of each expert by itself (DeepSeek-V3)
};

enum class ExpertActivation : uint8_t {
  kSwiglu,  // silu(w_gate x) * (w_up x), with three matrices an expert (Mixtral's w1, w3 and w2)
  kGelu,    // gelu(w_up x) with the error function; two matrices an expert
};

// What a router did in training forwards with gradients, for a loss of balance that is not of one layer's tokens alone.
struct RouterSums {
  at::Tensor chosen = {};         // [experts], fp32: choices of each expert, without a gradient
  at::Tensor probabilities = {};  // [experts]: those of each, added up over tokens, with a gradient
  int64_t tokens = 0;
};

struct ExpertsOptions {
  ExpertsOptions(int64_t d_model, int64_t d_hidden, int64_t experts, int64_t active)
      : d_model(d_model), d_hidden(d_hidden), experts(experts), active(active) {}
  int64_t d_model;   // features of a token
  int64_t d_hidden;  // features between an expert's matrices
  int64_t experts;
  int64_t active;  // experts of a token, 1 to `experts`

  Scoring scoring = Scoring::kSoftmax;
  // A token's weights are divided by their sum. false: they are the scores themselves.
  bool normalise = true;
  ExpertActivation activation = ExpertActivation::kSwiglu;

  // Factor of the loss that evens out how often experts are chosen (Fedus et al. 2021, equation 4, in the form of Mixtral):
  // balance_loss E sum over experts e of f_e P_e. f_e: choices of e for each token, without a gradient; P_e: the mean over tokens
  // of e's probability, which for kSigmoid is its part in the sum of a token's scores. It is balance_loss times `active` where experts
  // are chosen evenly. Of this rank's tokens of one forward. 0: none.
  double balance_loss = 0;
  // Keep RouterSums, which router_sums() gives.
  bool keep_router_sums = false;
  // Step of the balance without a loss (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024; DeepSeek-V3): each expert has a
  // bias that is added to its scores where experts are chosen, and not in the weights. update_balance() moves it. 0: none.
  double balance_bias_rate = 0;

  // Bounds the tokens of an expert in one forward to capacity_factor T k / E, rounded up, for T tokens of this rank. What is
  // beyond, in the order of tokens, is dropped: the expert adds nothing to that token, whose other weights stay as they are. So
  // does it in evaluation. Unset: no token is dropped.
  std::optional<double> capacity_factor = {};
};

class ExpertsImpl : public torch::nn::Cloneable<ExpertsImpl>, public SlicedLayer {
 public:
  // Draws parameters as torch::nn::Linear draws its weight. Throws unless all sizes are 1 or more, 1 <= active <= experts, a
  // capacity factor is above 0, and the balance's numbers are 0 or more.
  explicit ExpertsImpl(const ExpertsOptions& options);
  void reset() override;

  // input: [..., d_model], of the weights' dtype and device; under autocast of any floating-point dtype. Any number of tokens, also
  // none. Returns the input's sizes.
  //
  // Kept for backward, for n = tokens * active: 2 n d_model + 3 n d_hidden elements (kGelu: 2 n d_hidden), and in fp32 the
  // input and some numbers an expert and token. Bits: on the host they do not depend on the number of threads beyond what
  // LibTorch's matrix products do. On CUDA bf16 runs LibTorch's grouped products without a wait; other dtypes, and widths that are no
  // multiples of 16 bytes, wait for the number of tokens of each expert.
  // Throws for a last size other than d_model, other dtypes and devices.
  torch::Tensor forward(const torch::Tensor& input);

  // The sum of the losses of balance that training forwards with gradients have added since the last call; each is given once. A
  // scalar, fp32 (fp64 for fp64), with a gradient; zero where there is none. Call it once for each backward, and add it:
  //
  //   loss = criterion(model(x), y);
  //   loss = loss + model->experts->auxiliary_loss();     // a line of its own: C++ may compute the right side of a + first
  //
  // So it is scaled and averaged as the loss is, over micro-steps and ranks. Several layers: add that of each. Repetitions of
  // a checkpointed region add nothing; what the region's forward added may be taken within that region or behind it.
  // forward() throws where 32 forwards have added losses that nobody has taken, since their graphs stay until then.
  torch::Tensor auxiliary_loss();

  // The sums over forwards since the last call, each given once, as auxiliary_loss() gives its losses; nullopt where there are none.
  // With ExpertsOptions::keep_router_sums. Those of several layers, for one loss of all of their tokens:
  //
  //   loss = loss + factor * experts * (sum of chosen / sum of tokens * sum of probabilities / sum of tokens).sum();
  std::optional<RouterSums> router_sums();

  // Moves the bias of each expert by balance_bias_rate, up where it was chosen less often than the mean of all experts, and
  // down where more often, over training forwards with gradients of all ranks since the last call. Call it once for each step
  // of the optimizer, after step() and before the state is saved. Collective over `world`: the ranks whose tokens differ. Costs
  // World::sum() of `experts` numbers. Without balance_bias_rate it throws; where no token came the bias stays.
  void update_balance(const comm::World& world);

  // How often tokens of this rank chose each expert, [experts], int64, in training forwards with gradients since the layer was made
  // or update_balance(), on the router's device. What `capacity_factor` drops counts, and forwards of a module without values do not.
  // World::sum() of it over the ranks whose tokens differ is that of all.
  torch::Tensor choices() const;

  // What expert_parallel() does to a layer (zeropage/expert_parallel.h). ranks: this rank's group along "expert". same: the ranks with its
  // place there. is_cut: this rank keeps experts / P of its P ranks, and tokens travel; else all of them stay.
  void place(const comm::World& ranks, const comm::World& same, bool is_cut);
  const ExpertsOptions& options() const { return options_; }

  std::vector<SlicedParameter> sliced_parameters() const override;
  const comm::World& ranks_of_slices() const override;
  std::optional<comm::World> ranks_of_same_slices() const override;
  std::vector<at::Tensor> buffers_by_own_tokens() const override { return {balance_bias}; }

  void pretty_print(std::ostream& stream) const override;

  torch::Tensor router;  // [experts, d_model]
  torch::Tensor w_up;    // [experts, d_hidden, d_model]; where experts are cut, those of this rank
  torch::Tensor w_gate;  // the same; undefined without kSwiglu
  torch::Tensor w_down;  // [experts, d_model, d_hidden]; the same
  torch::Tensor balance_bias;  // [experts], fp32, a buffer; undefined without balance_bias_rate

 private:
  struct Placed;

  int64_t experts_here() const;
  at::ScalarType computed_in(const torch::Tensor& input) const;
  torch::Tensor scores_of(const torch::Tensor& tokens) const;
  torch::Tensor by_experts_of_all(const torch::Tensor& copies, const torch::Tensor& load) const;

  ExpertsOptions options_;
  std::shared_ptr<const Placed> placed_;       // null: nobody placed it
  std::shared_ptr<fused::RouterNotes> notes_;  // this rank's, so no buffer
};
TORCH_MODULE(Experts);

}  // namespace zeropage::parallel
