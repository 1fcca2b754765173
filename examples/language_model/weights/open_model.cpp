#include "language_model/weights/open_model.h"

#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include <zeropage/mesh.h>

#include "language_model/weights/adapters.h"
#include "language_model/weights/renamed_weights.h"

namespace language_model {
namespace {

WrappedModel wrapped(const ModelConfig& config, const MakeOptions& made,
                     const zeropage::comm::World& world, const OpenOptions& options,
                     const std::optional<AdapterTargets>& adapters) {
  zeropage::DeferredModule<std::shared_ptr<LanguageModel>> deferred([&] {
    auto model = make_model(config, made);
    if (adapters) {
      torch::manual_seed(adapters->seed);
      model->add_adapters(adapters->layers, adapters->options);
    } else if (config.experts && !made.seed) {
      // What the layers of experts draw is zeroed. Seeded again, the generator needs none of those draws, and nobody makes them.
      torch::manual_seed(0);
    }
    if (options.is_frozen) {
      for (torch::Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
    }
    return model;
  });
  if (options.expert_parallel != 1) {
    const int ranks = options.expert_parallel;
    TORCH_CHECK(options.context == 1, "experts over ", ranks, " ranks and rows over ",
                options.context, ": expected one of both; leave the other out");
    TORCH_CHECK(!adapters, "experts over ", ranks,
                " ranks: adapters are not supported beside them; leave one of both out");
    TORCH_CHECK(ranks > 0 && world.size() % ranks == 0, "experts over ", ranks,
                " ranks: they do not divide the world's ", world.size(), "; use a divisor");
    const zeropage::comm::Mesh mesh(world, {{"data", world.size() / ranks}, {"expert", ranks}});
    deferred.module()->spread_experts(mesh);
    return {std::move(deferred), mesh, options.sharding};
  }
  if (options.context == 1) return {std::move(deferred), world, options.sharding};
  TORCH_CHECK(options.context > 0 && world.size() % options.context == 0, "rows over ",
              options.context, " ranks: they do not divide the world's ", world.size(),
              "; use a divisor");
  const zeropage::comm::Mesh mesh(
      world, {{"data", world.size() / options.context}, {"context", options.context}});
  deferred.module()->share_rows({mesh["context"], options.context_form});
  return {std::move(deferred), mesh, options.sharding};
}

// New adapters keep what they were drawn with, and nothing else may be missing. Before anything is written.
void check_only_adapters_are_missing(const zeropage::WeightsSource& source,
                                     const WrappedModel& model) {
  std::set<std::string> there;
  for (const auto& entry : source.tensors()) there.insert(entry.name);
  // Other entries of a file's metadata are among them.
  for (const auto& [alias, name] : source.aliases()) {
    if (there.contains(name)) there.insert(alias);
  }
  // A tied parameter is there under one of its names.
  std::map<const c10::TensorImpl*, std::vector<std::string>> names;
  for (const auto& parameter : model.named_parameters()) {
    names[parameter.value().unsafeGetTensorImpl()].push_back(parameter.key());
  }
  std::set<std::string> missing, unexpected = there;
  for (const auto& [parameter, of_parameter] : names) {
    bool is_there = false;
    for (const std::string& name : of_parameter) {
      is_there |= there.contains(name);
      unexpected.erase(name);
    }
    if (!is_there && !is_of_adapter(of_parameter.front())) missing.insert(of_parameter.front());
  }
  std::string wrong;
  for (const std::string& name : missing) wrong += "\n  missing in it: " + name;
  for (const std::string& name : unexpected) wrong += "\n  unexpected: " + name;
  if (wrong.empty()) return;
  throw std::runtime_error(source.name() + ": the weights are of another model:" + wrong);
}

}  // namespace

WrappedModel open_model(const ModelFiles& files, const zeropage::comm::World& world,
                        const OpenOptions& options) {
  std::optional<AdapterTargets> adapters = options.adapters;
  auto source = std::make_unique<RenamedWeights>(files.open_weights());
  if (!options.adapters_from.empty()) {
    TORCH_CHECK(!adapters, "a model has either new adapters or saved ones");
    const AdapterFiles saved(options.adapters_from);
    adapters = AdapterTargets{.options = saved.options(), .layers = saved.layers()};
    source->add(saved.open_weights());
  }
  WrappedModel model = wrapped(files.config(), {}, world, options, adapters);
  const bool has_new = options.adapters.has_value();
  if (has_new) check_only_adapters_are_missing(*source, model);
  zeropage::load_weights(*source, model, {.strict = !has_new});
  return model;
}

WrappedModel new_model(const ModelConfig& config, uint64_t seed, const zeropage::comm::World& world,
                       const OpenOptions& options) {
  return wrapped(config, {.seed = seed}, world, options, options.adapters);
}

}  // namespace language_model
