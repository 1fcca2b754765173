// Options of the command line whose values are sizes, and what numbers they take.
#pragma once

#include <cstdint>
#include <string>

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace train_gpt {

// Bytes with an optional unit, such as 64MiB; fewer than `least` are refused.
CLI::Option* add_bytes(CLI::App& app, const std::string& flag, int64_t& bytes, int64_t least,
                       const std::string& help);

// A number above 0, and one from 0 on: CLI11's own say that they end at 1.8e308, digit by digit.
CLI::Validator positive();
CLI::Validator non_negative();

}  // namespace train_gpt
