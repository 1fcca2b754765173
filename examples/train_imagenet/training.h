// One rank's run: trains, validates, saves, goes on.
#pragma once

#include <string>

#include "examples/image_models/model_registry.h"
#include "examples/train_imagenet/config.h"
#include "zero/zeropage.h"

namespace train_imagenet {

// Collective. Returns the SHA-256 of the weights as they are in the end.
std::string run(const Config& config, const image_models::ModelRegistry& models,
                zeropage::World& world);

}  // namespace train_imagenet
