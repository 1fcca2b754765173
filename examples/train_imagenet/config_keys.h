// A Config as a list of keys, each of which takes and gives text: for files, command lines, help and comparisons.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>
#include <yaml-cpp/yaml.h>

#include "train_imagenet/config.h"

namespace train_imagenet {

// What is wrong with a key or its value, and where.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr const char* kAnyText = "text";

struct ConfigKey {
  std::string name;      // "TRAIN.BATCH"
  std::string help;      // one line
  std::string expected;  // "a whole number of at least 1"; kAnyText
  std::string fallback;  // the default, in words
  // Takes a value of a file. Throws YAML::Exception or ConfigError where it is none; the caller says which key, and what is expected.
  std::function<void(const YAML::Node&)> set;
  // The value as a file has it.
  std::function<std::string()> text;
};

// Its keys, in the order of its tables. The config outlives them.
std::vector<ConfigKey> keys_of(Config& config);

// The table of keys for people, in Markdown.
std::string keys_table();

}  // namespace train_imagenet
