// Image models by name, for programs whose users choose one by a word. One of your own is a line:
//
//   image_models::ModelRegistry models = image_models::ModelRegistry::standard();
//   models.add("my_net", [](const image_models::ModelOptions& options) { return std::make_shared<MyNetImpl>(options); });
//
// A value; constant after construction any thread may ask it. Throws c10::Error.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "image_models/image_model.h"

namespace image_models {

class ModelRegistry {
 public:
  using Make = std::function<std::shared_ptr<ImageModel>(const ModelOptions&)>;

  // resnet18, resnet50, botnet50, efficientnet_lite0, and the first three for small images: resnet18_small and so on.
  static ModelRegistry standard();

  // Throws for a name that there is already.
  void add(const std::string& name, Make make);
  // Draws from LibTorch's generator. Throws for a name that there is not; the message has all that there are.
  std::shared_ptr<ImageModel> make(const std::string& name, const ModelOptions& options) const;
  bool has(const std::string& name) const { return makes_.contains(name); }
  std::vector<std::string> names() const;

 private:
  std::map<std::string, Make> makes_;
};

}  // namespace image_models
