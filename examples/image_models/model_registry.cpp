#include "image_models/model_registry.h"

#include <utility>

#include <c10/util/StringUtil.h>
#include <zeropage/check.h>

#include "image_models/efficientnet.h"
#include "image_models/resnet.h"

namespace image_models {
namespace {

using Published = ResNetOptions (*)(const ModelOptions&);

ModelRegistry::Make resnet(Published published, Stem stem) {
  return [published, stem](const ModelOptions& options) {
    ResNetOptions resnet = published(options);
    resnet.stem = stem;
    return std::make_shared<ResNetImpl>(resnet);
  };
}

}  // namespace

ModelRegistry ModelRegistry::standard() {
  ModelRegistry models;
  const std::map<std::string, Published> residual = {{"resnet18", ResNetOptions::resnet18},
                                                     {"resnet50", ResNetOptions::resnet50},
                                                     {"botnet50", ResNetOptions::botnet50}};
  for (const auto& [name, published] : residual) {
    models.add(name, resnet(published, Stem::kLarge));
    models.add(name + "_small", resnet(published, Stem::kSmall));
  }
  models.add("efficientnet_lite0", [](const ModelOptions& options) {
    return std::make_shared<EfficientNetLiteImpl>(options);
  });
  return models;
}

void ModelRegistry::add(const std::string& name, Make make) {
  const bool is_new = makes_.emplace(name, std::move(make)).second;
  ZP_CHECK(is_new, "ModelRegistry: there is a model \"", name,
           "\" already; give yours another name");
}

std::shared_ptr<ImageModel> ModelRegistry::make(const std::string& name,
                                                const ModelOptions& options) const {
  const auto found = makes_.find(name);
  ZP_CHECK(found != makes_.end(), "there is no model \"", name, "\"; expected one of ",
           c10::Join(", ", names()));
  return found->second(options);
}

std::vector<std::string> ModelRegistry::names() const {
  std::vector<std::string> names;
  for (const auto& [name, make] : makes_) names.push_back(name);
  return names;
}

}  // namespace image_models
