// What the examples' command lines have in common: how a mistake ends, and numbers that are checked in words.
//
// Threads: one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace examples {

// The exit code of a program whose command line makes no sense.
inline constexpr int kUsageError = 2;

// Reads the command line. Returns nothing where the program goes on, and else its exit code: 0 where help was asked for
// and printed, kUsageError behind a mistake, which stderr tells. CLI11's own codes are 100 and above, one a kind of
// mistake.
std::optional<int> parse(CLI::App& app, int argc, char** argv);

// A size with an optional unit, such as 64MiB (zeropage/bytes.h); fewer bytes than `least` are refused.
CLI::Option* add_bytes(CLI::App& app, const std::string& flag, int64_t& bytes, int64_t least,
                       const std::string& help);

// A number above 0, and one from 0 on. CLI11's own checks print that such numbers end at 1.8e308, in 309 digits.
CLI::Validator positive();
CLI::Validator non_negative();

}  // namespace examples
