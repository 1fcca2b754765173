// --experts: the layers of experts in the place of MLPs, what they have of the model's parameters, and how evenly tokens
// took them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <nlohmann/json_fwd.hpp>
#include <torch/torch.h>

#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/places.h"
#include "examples/byte_gpt/gpt.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/experts.h"

namespace train_gpt {

// Empty without --experts.
MakeFeedForward make_experts(const Flags& flags);
// The layers of a module, in the order of its blocks.
std::vector<std::shared_ptr<zeropage::parallel::ExpertsImpl>> layers_of_experts(
    const torch::nn::Module& module);
// Spreads them over ranks as --expert-parallel says; what became of each layer. Collective.
std::vector<zeropage::PlacedExperts> place_experts(const Gpt& gpt, const Places& places,
                                                   const Flags& flags);

// Elements of all layers: `experts` of each, and their routers.
int64_t parameters_of_experts(const Flags& flags, int64_t experts);

// How unevenly the tokens of all steps were routed, by layer; 1 is even.
struct ExpertLoad {
  std::vector<double> experts;  // the busiest expert's tokens, over the mean of all experts
  std::vector<double> ranks;    // the busiest rank's, over the mean of those that share experts

  // The worst layer's.
  double worst_expert() const;
  double worst_rank() const;
};
// Collective.
ExpertLoad expert_load(const torch::nn::Module& module, const Places& places, const Flags& flags);

// What a run with experts writes of them.
struct ExpertReport {
  std::vector<zeropage::PlacedExperts> placed;  // empty: all ranks have all experts
  ExpertLoad load;                              // empty: a simulated run has none
};
nlohmann::json experts_json(const ExpertReport& report, const Flags& flags);
// "8 experts of 64 features a block, 2 of them a token; ...", a line or two; "" without experts.
std::string experts_text(const std::vector<zeropage::PlacedExperts>& placed, const Flags& flags);

}  // namespace train_gpt
