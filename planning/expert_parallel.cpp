#include "zeropage/expert_parallel.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "operators/tensor_mark.h"
#include "zero/gradients/hooks.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/experts.h"

namespace zeropage {
namespace {

constexpr const char* kExpertParallel = "expert_parallel()";

struct Layer {
  std::string name;
  parallel::ExpertsImpl* experts;
};

std::vector<Layer> layers_of(torch::nn::Module& module) {
  std::vector<Layer> layers;
  const auto add = [&layers](const std::string& name, torch::nn::Module& of) {
    auto* const experts = dynamic_cast<parallel::ExpertsImpl*>(&of);
    const auto is_known = [experts](const Layer& layer) { return layer.experts == experts; };
    // A layer that is used twice has two names.
    if (experts == nullptr || std::any_of(layers.begin(), layers.end(), is_known)) return;
    layers.push_back({name, experts});
  };
  add("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    add(child.key(), *child.value());
  }
  return layers;
}

// What a collective sends that gathers so many bytes over ranks, or reduces and scatters them.
double sent(double bytes, int ranks) {
  return bytes * (ranks - 1) / ranks;
}

// What data parallelism sends for parameters between that many ranks: the reduction of gradients, and gathers of parameters.
double sent_of_parameters(double numel, int ranks, const Options& options, at::ScalarType dtype) {
  const auto bytes = static_cast<double>(c10::elementSize(dtype));
  const auto of_gradient = static_cast<double>(c10::elementSize(reduce_dtype_of(options, dtype)));
  const double reduced = sent(numel * of_gradient, ranks);
  const double gathered = sent(numel * bytes, ranks);
  if (zero::shards_parameters(options)) return reduced + 2 * gathered;
  return zero::shards_states(options) ? reduced + gathered : 2 * reduced;
}

ExpertTraffic traffic_of(const parallel::ExpertsImpl& layer, const comm::Mesh& mesh, int64_t tokens,
                         const Options& options) {
  const parallel::ExpertsOptions& sizes = layer.options();
  const at::ScalarType dtype = options.compute_dtype.value_or(layer.w_up.scalar_type());
  const int matrices = layer.w_gate.defined() ? 3 : 2;
  const auto numel = static_cast<double>(matrices * sizes.experts * sizes.d_hidden * sizes.d_model);
  const auto rows = static_cast<double>(tokens * sizes.active * sizes.d_model) *
                    static_cast<double>(c10::elementSize(dtype));
  const int ranks = mesh["expert"].size();
  // To the experts and back, in forward and in backward.
  const double travelling =
      4 * sent(rows, ranks) +
      sent_of_parameters(numel / ranks, mesh.same_experts().size(), options, dtype);
  const double whole = sent_of_parameters(numel, mesh.samples().size(), options, dtype);
  return {.tokens = static_cast<int64_t>(travelling), .weights = static_cast<int64_t>(whole)};
}

// A weight would be cut twice.
void check_shares_none(const std::vector<Layer>& layers) {
  std::unordered_map<const at::TensorImpl*, const Layer*> layer_of;
  for (const Layer& layer : layers) {
    for (const at::Tensor& weight :
         {layer.experts->w_up, layer.experts->w_gate, layer.experts->w_down}) {
      if (!weight.defined()) continue;
      const auto [known, is_new] = layer_of.try_emplace(weight.unsafeGetTensorImpl(), &layer);
      ZP_CHECK(
          is_new, kExpertParallel, ": layers \"", known->second->name, "\" and \"", layer.name,
          "\" share a weight; register one layer in both places, or give each weights of its own");
    }
  }
}

void check_layer(const Layer& layer, const comm::World& experts) {
  const int64_t count = layer.experts->options().experts;
  ZP_CHECK(count % experts.size() == 0, kExpertParallel, ": layer \"", layer.name, "\" has ", count,
           " experts, which ", experts.size(),
           " ranks along \"expert\" do not divide; give that axis a number of ranks that does");
  ZP_CHECK(!layer.experts->ranks_of_same_slices(), kExpertParallel, ": layer \"", layer.name,
           "\" is placed already; call it once, on the module that is wrapped");
  ZP_CHECK(!operators::may_be_paged(layer.experts->w_up) &&
               !zero::has_accumulate_hooks(layer.experts->w_up),
           kExpertParallel, ": layer \"", layer.name,
           "\" is in a module that is wrapped: expected one that is not; call it before "
           "DistributedDataParallel is constructed");
  ZP_CHECK(layer.experts->w_up.is_meta() || !experts.device().is_meta(), kExpertParallel,
           ": layer \"", layer.name,
           "\" has values, and a simulated world has none; construct the module as a "
           "DeferredModule, and give its module()");
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const PlacedExperts& placed) {
  stream << "layer \"" << placed.layer
         << "\": " << (placed.tokens_travel ? "tokens travel to experts" : "experts stay whole");
  if (placed.traffic.weights == 0) return stream;
  return stream << " (" << memory::format_bytes(placed.traffic.tokens) << " a step, or "
                << memory::format_bytes(placed.traffic.weights) << " of weights)";
}

std::vector<PlacedExperts> expert_parallel(torch::nn::Module& module, const comm::Mesh& mesh,
                                           int64_t tokens, const Options& options) {
  ZP_CHECK(
      mesh.has("expert"), kExpertParallel,
      ": the mesh has no axis \"expert\"; make it as Mesh(world, {{\"data\", ...}, {\"expert\", "
      "...}})");
  ZP_CHECK(tokens >= 0, kExpertParallel, ": expected a number of tokens of 0 or more, got ", tokens,
           "; give those of a rank in one forward, or 0 where they always travel");
  const comm::World& experts = mesh["expert"];
  const std::vector<Layer> layers = layers_of(module);
  ZP_CHECK(
      !layers.empty(), kExpertParallel,
      ": the module has no layer of experts (zeropage/experts.h); leave the call and the axis out");
  check_shares_none(layers);
  std::vector<std::string> lines = {c10::str("tokens: ", tokens)};
  for (const Layer& layer : layers) {
    check_layer(layer, experts);
    const parallel::ExpertsOptions& sizes = layer.experts->options();
    lines.push_back(c10::str("layer \"", layer.name, "\": ", sizes.experts, " experts, d_model ",
                             sizes.d_model, ", d_hidden ", sizes.d_hidden, ", active ",
                             sizes.active, ", capacity_factor ", sizes.capacity_factor.value_or(0),
                             ", balance_loss ", sizes.balance_loss, ", balance_bias_rate ",
                             sizes.balance_bias_rate));
  }
  std::vector<PlacedExperts> all;
  for (const Layer& layer : layers) {
    PlacedExperts placed{.layer = layer.name, .tokens_travel = experts.size() > 1, .traffic = {}};
    if (tokens > 0) {
      placed.traffic = traffic_of(*layer.experts, mesh, tokens, options);
      placed.tokens_travel = placed.tokens_travel && placed.traffic.tokens < placed.traffic.weights;
    }
    lines.push_back(c10::str(placed));
    all.push_back(std::move(placed));
  }
  mesh.samples().check_agreement(kExpertParallel, lines);
  for (size_t index = 0; index < layers.size(); ++index) {
    layers[index].experts->place(experts, mesh.same_experts(), all[index].tokens_travel);
  }
  return all;
}

}  // namespace zeropage
