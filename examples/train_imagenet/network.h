// The network before it is wrapped: made, loaded, its batch norms joined.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <zeropage/names.h>

#include "image_models/model_registry.h"
#include "train_imagenet/config.h"

namespace train_imagenet {

struct Network {
  std::shared_ptr<image_models::ImageModel> module;  // on the world's device
  std::string note;                                  // on what was loaded; "" where nothing was
};

// Collective. The same on all ranks but for what they throw: c10::Error, or StateError where LOAD_WEIGHTS is of another network.
Network make_network(const Config& config, const image_models::ModelRegistry& models,
                     int64_t classes, const zeropage::World& world);

}  // namespace train_imagenet
