// Reads a Config from a YAML file and the `KEY VALUE` pairs behind it, and writes one.
//
//   TRAIN:
//     BATCH: 512
//     MIXUP: 0.2
//
// Throws ConfigError: which file and line, which key, what was expected and what is there. An unknown key is answered with the nearest one.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train_imagenet/config.h"
#include "train_imagenet/config_keys.h"

namespace train_imagenet {

// overrides: TRAIN.BATCH, 512, ...; file may be "": defaults.
Config read_config(const std::filesystem::path& file, const std::vector<std::string>& overrides);

// Text of a file that read_config() takes.
std::string config_text(const Config& config);

}  // namespace train_imagenet
