// One rank's run: trains, validates, saves, goes on.
#pragma once

#include <string>

#include <zeropage/zeropage.h>

#include "image_models/model_registry.h"
#include "train_imagenet/config.h"

namespace train_imagenet {

struct Ended {
  std::string weights_sha256;  // as they are in the end
  int signal = 0;              // that ended the run after a save; then there is no hash
};

// Collective.
Ended run(const Config& config, const image_models::ModelRegistry& models, zeropage::World& world);

}  // namespace train_imagenet
