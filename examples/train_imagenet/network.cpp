#include "train_imagenet/network.h"

#include <algorithm>
#include <mutex>
#include <set>

#include <torch/nn/modules/batchnorm.h>
#include <zeropage/check.h>
#include <zeropage/parallel_layers.h>
#include <zeropage/saving.h>

namespace train_imagenet {
namespace {

using image_models::ImageModel;

// Threads share the generator that modules draw from, so ranks that are threads construct one after the other.
std::shared_ptr<ImageModel> made_alike(const Config& config,
                                       const image_models::ModelRegistry& models, int64_t classes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(static_cast<uint64_t>(config.train.seed));
  return models.make(
      config.model.name,
      {.classes = classes, .image_side = config.data.image_side, .width = config.model.width});
}

void set_batch_norm_momentum(torch::nn::Module& network, double momentum) {
  for (const auto& module : network.modules()) {
    auto* const norm = module->as<torch::nn::BatchNorm2dImpl>();
    if (norm != nullptr) norm->options.momentum(momentum);
  }
}

bool is_within(const std::vector<std::string>& names, const std::set<std::string>& allowed) {
  return std::all_of(names.begin(), names.end(),
                     [&](const std::string& name) { return allowed.contains(name); });
}

// Without the head, where nothing but the head is in the way. Returns whether it is so.
bool load_without_head(const std::string& file, ImageModel& module) {
  std::set<std::string> head;
  zeropage::ModuleLoadOptions options{.strict = false};
  for (const auto& parameter : module.named_parameters()) {
    if (!parameter.key().starts_with(module.head() + ".")) continue;
    head.insert(parameter.key());
    options.names[parameter.key()] = "";  // the file has no such name
  }
  const zeropage::ModuleLoadReport report = zeropage::load_weights(file, module, options);
  return is_within(report.missing, head) && is_within(report.unexpected, head);
}

std::string load(const std::string& file, ImageModel& module, bool eval_only) {
  try {
    zeropage::load_weights(file, module);
    return "LOAD_WEIGHTS " + file + ": all weights";
  } catch (const zeropage::state::StateError&) {
    bool loaded = false;
    try {
      loaded = load_without_head(file, module);
    } catch (const zeropage::state::StateError&) {
      // The first error has all names.
    }
    if (!loaded) throw;
    ZP_CHECK(!eval_only, "EVAL_ONLY: LOAD_WEIGHTS ", file, " has the head \"", module.head(),
             "\" of other classes, so a head that nobody trained would be validated; give weights "
             "of these classes, or LOAD_WEIGHTS '' for the newest state of OUT_DIR");
  }
  return "LOAD_WEIGHTS " + file + ": all weights but the head \"" + module.head() +
         "\", which is of other classes and begins anew";
}

}  // namespace

Network make_network(const Config& config, const image_models::ModelRegistry& models,
                     int64_t classes, const zeropage::World& world) {
  ZP_CHECK(models.has(config.model.name), "MODEL.NAME: there is no network \"", config.model.name,
           "\"; expected one of ", c10::Join(", ", models.names()));
  Network network{made_alike(config, models, classes), ""};
  if (!config.load_weights.empty())
    network.note = load(config.load_weights, *network.module, config.eval_only);
  if (config.model.batch_norm_momentum > 0) {
    set_batch_norm_momentum(*network.module, config.model.batch_norm_momentum);
  }
  network.module->to(world.device());
  // LibTorch's norms take fp32 parameters and statistics beside inputs in a lower precision, not beside double.
  if (config.zero.dtype == c10::kDouble) network.module->to(c10::kDouble);
  if (config.model.sync_batch_norm && world.size() > 1) {
    zeropage::sync_batch_norm(*network.module, world);
  }
  return network;
}

}  // namespace train_imagenet
