#include "language_model/weights/open_model.h"

#include <stdexcept>
#include <utility>

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
    }
    return model;
  });
  return {std::move(deferred), world, options.sharding};
}

// New adapters keep what they were drawn with, and nothing else may be missing.
void check_only_adapters_are_missing(const zeropage::LoadReport& report, const std::string& from) {
  std::string wrong;
  for (const std::string& name : report.missing) {
    if (!is_of_adapter(name)) wrong += "\n  missing in it: " + name;
  }
  for (const std::string& name : report.unexpected) wrong += "\n  unexpected: " + name;
  if (!wrong.empty())
    throw std::runtime_error(from + ": the weights are of another model:" + wrong);
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
  const auto report = zeropage::load_weights(*source, model, {.strict = !has_new});
  if (has_new) check_only_adapters_are_missing(report, files.path().string());
  return model;
}

WrappedModel new_model(const ModelConfig& config, uint64_t seed, const zeropage::comm::World& world,
                       const OpenOptions& options) {
  return wrapped(config, {.seed = seed}, world, options, options.adapters);
}

}  // namespace language_model
