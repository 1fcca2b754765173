// Names what photographs show, by a network that was trained or fetched.
//
//   classify_images --config examples/train_imagenet/configs/efficientnet_lite0.yaml tiger.png
#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <zeropage/check.h>
#include <zeropage/data/image_file.h>
#include <zeropage/saving.h>

#include "command_line/command_line.h"
#include "image_models/model_registry.h"
#include "train_imagenet/config_file.h"
#include "train_imagenet/image_data.h"

namespace train_imagenet {
namespace {

struct ClassifyFlags {
  std::string config;
  std::string weights;  // "": the configuration's LOAD_WEIGHTS
  std::string names;    // "": numbers
  std::vector<std::string> images;
};

constexpr int64_t kShown = 5;

std::vector<std::string> names_in(const std::string& file) {
  const auto names = nlohmann::json::parse(std::ifstream(file), nullptr, false);
  const bool is_list =
      names.is_array() &&
      std::all_of(names.begin(), names.end(), [](const auto& name) { return name.is_string(); });
  ZP_CHECK(is_list, "--names ", file,
           ": expected a list of names in JSON, in the order of the scores");
  return names.get<std::vector<std::string>>();
}

void show(const std::string& image, const torch::Tensor& scores,
          const std::vector<std::string>& names) {
  std::cout << image << '\n';
  const auto [shares, classes] = scores.softmax(0).topk(std::min<int64_t>(kShown, scores.size(0)));
  for (int64_t i = 0; i < shares.size(0); ++i) {
    const auto number = classes[i].item<int64_t>();
    const bool has_name = number < static_cast<int64_t>(names.size());
    std::printf("  %6.2f %%  %s\n", 100 * shares[i].item<double>(),
                has_name ? names[static_cast<size_t>(number)].c_str()
                         : ("class " + std::to_string(number)).c_str());
  }
}

void classify(const ClassifyFlags& line) {
  Config config = read_config(line.config, {});
  if (!line.weights.empty()) config.load_weights = line.weights;
  ZP_CHECK(!config.load_weights.empty(),
           "classify_images: expected weights; give --weights FILE, or "
           "LOAD_WEIGHTS in the configuration");
  const std::vector<std::string> names =
      line.names.empty() ? std::vector<std::string>() : names_in(line.names);
  const int64_t classes =
      config.model.classes > 0 ? config.model.classes : static_cast<int64_t>(names.size());
  ZP_CHECK(classes > 0,
           "classify_images: expected how many classes the network has; give --names "
           "FILE, or MODEL.CLASSES in the configuration");
  const auto network = image_models::ModelRegistry::standard().make(
      config.model.name,
      {.classes = classes, .image_side = config.data.image_side, .width = config.model.width});
  zeropage::load_weights(config.load_weights, network);
  network->eval();
  const torch::NoGradGuard no_grad;
  const zeropage::data::Transform centre = ImageData::centre(config);
  for (const std::string& file : line.images) {
    const torch::Tensor image = centre(zeropage::data::read_image(file), {0, 0, 0});
    show(file, network->forward(image.unsqueeze(0))[0], names);
  }
}

}  // namespace
}  // namespace train_imagenet

int main(int argc, char** argv) {
  train_imagenet::ClassifyFlags line;
  CLI::App app("Names what photographs show");
  app.add_option("--config", line.config, "Configuration of train_imagenet")->required();
  app.add_option("--weights", line.weights,
                 "Safetensors or a state; default: LOAD_WEIGHTS of the configuration");
  app.add_option("--names", line.names, "List of class names in JSON; default: numbers");
  app.add_option("images", line.images, "PNG or JPEG files")->required();
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) return *ended;
  try {
    train_imagenet::classify(line);
    return 0;
  } catch (const train_imagenet::ConfigError& error) {
    std::cerr << "classify_images: " << error.what() << '\n';
    return examples::kUsageError;
  } catch (const std::exception& error) {
    std::cerr << "classify_images: " << zeropage::memory::message_of(error) << '\n';
    return 1;
  }
}
