#include "bench/train_gpt/expert_layers.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "bench/train_gpt/model.h"
#include "zeropage/bytes.h"
#include "zeropage/world.h"

namespace train_gpt {
namespace {

using zeropage::parallel::ExpertActivation;
using zeropage::parallel::ExpertsImpl;
using zeropage::parallel::ExpertsOptions;

// An expert with kGelu, the MLP's function, has an upward and a downward one.
constexpr int64_t kMatrices = 2;

// load: [parts], the tokens of each.
double busiest_over_mean(const torch::Tensor& load) {
  return load.max().item<double>() / std::max(1.0, load.sum().item<double>()) *
         static_cast<double>(load.numel());
}

double largest_of(const std::vector<double>& values) {
  return values.empty() ? 1 : *std::max_element(values.begin(), values.end());
}

}  // namespace

MakeFeedForward make_experts(const Flags& flags) {
  if (!flags.experts.any()) return {};
  ExpertsOptions options(flags.model.d_model, flags.experts.hidden, flags.experts.experts,
                         flags.experts.active);
  options.activation = ExpertActivation::kGelu;
  options.balance_loss = flags.experts.balance_loss;
  if (flags.experts.capacity > 0) options.capacity_factor = flags.experts.capacity;
  return [options] { return torch::nn::AnyModule(zeropage::parallel::Experts(options)); };
}

std::vector<std::shared_ptr<ExpertsImpl>> layers_of_experts(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<ExpertsImpl>> layers;
  for (const auto& part : module.modules(/*include_self=*/false)) {
    if (auto layer = std::dynamic_pointer_cast<ExpertsImpl>(part)) {
      layers.push_back(std::move(layer));
    }
  }
  return layers;
}

std::vector<zeropage::PlacedExperts> place_experts(const Gpt& gpt, const Places& places,
                                                   const Flags& flags) {
  if (places.along("expert") == nullptr) return {};
  const bool compares = flags.experts.travel == "auto";
  const int64_t tokens = flags.batch * flags.model.sequence / flags.context;
  return zeropage::expert_parallel(gpt, *places.mesh, compares ? tokens : 0, flags.options);
}

int64_t parameters_of_experts(const Flags& flags, int64_t experts) {
  const int64_t d = flags.model.d_model;
  return flags.model.layers *
         (flags.experts.experts * d + experts * kMatrices * flags.experts.hidden * d);
}

double ExpertLoad::worst_expert() const {
  return largest_of(experts);
}

double ExpertLoad::worst_rank() const {
  return largest_of(ranks);
}

ExpertLoad expert_load(const torch::nn::Module& module, const Places& places, const Flags& flags) {
  ExpertLoad load;
  const int64_t parts = flags.experts_are_cut ? flags.experts.parallel : 1;
  for (const auto& layer : layers_of_experts(module)) {
    const torch::Tensor of_all = places.samples.sum(layer->choices()).to(torch::kFloat64);
    load.experts.push_back(busiest_over_mean(of_all));
    load.ranks.push_back(busiest_over_mean(of_all.view({parts, -1}).sum(1)));
  }
  return load;
}

nlohmann::json experts_json(const ExpertReport& report, const Flags& flags) {
  if (!flags.experts.any()) return {};
  nlohmann::json json = {{"active_parameters", active_parameters_of(flags)},
                         {"hidden", flags.experts.hidden},
                         {"travel", flags.experts.parallel == 1 ? nlohmann::json()
                                    : flags.experts_are_cut     ? nlohmann::json("tokens")
                                                                : nlohmann::json("weights")},
                         {"tokens_bytes", {}},
                         {"weights_bytes", {}}};
  if (flags.experts.travel == "auto" && !report.placed.empty()) {
    int64_t tokens = 0, weights = 0;
    for (const zeropage::PlacedExperts& layer : report.placed) {
      tokens += layer.traffic.tokens;
      weights += layer.traffic.weights;
    }
    json["tokens_bytes"] = tokens;
    json["weights_bytes"] = weights;
  }
  if (!report.load.experts.empty()) {
    json["load_imbalance"] = report.load.experts;
    json["rank_load_imbalance"] = report.load.ranks;
  }
  return json;
}

std::string experts_text(const std::vector<zeropage::PlacedExperts>& placed, const Flags& flags) {
  if (!flags.experts.any()) return "";
  std::string text =
      c10::str(flags.experts.experts, " experts of ", flags.experts.hidden, " features a block, ",
               flags.experts.active, " of them a token; a token meets ",
               active_parameters_of(flags), " parameters");
  if (!placed.empty()) {
    // All blocks have layers of the same sizes.
    const zeropage::PlacedExperts& layer = placed.front();
    text += c10::str("\nexperts over ", flags.experts.parallel, " ranks: ",
                     layer.tokens_travel ? "tokens travel to them" : "all ranks have all of them");
    if (layer.traffic.weights > 0) {
      using zeropage::memory::format_bytes;
      text += c10::str(" (a block and micro-step: ", format_bytes(layer.traffic.tokens),
                       " where tokens travel, ", format_bytes(layer.traffic.weights),
                       " where weights do)");
    }
  }
  return text + '\n';
}

}  // namespace train_gpt
