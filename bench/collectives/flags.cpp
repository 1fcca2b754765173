#include "bench/collectives/flags.h"

#include <algorithm>
#include <memory>

#include <CLI/CLI.hpp>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace collectives {
namespace {

constexpr int kMostRanks = 64;
constexpr int64_t kSizeFactor = 4;
constexpr const char* kRange = "..";

void require(bool condition, const std::string& message) {
  if (!condition) throw CLI::ValidationError(message);
}

int64_t parse_size(const std::string& text) {
  try {
    return zeropage::memory::parse_bytes(text);
  } catch (const std::exception& error) {
    throw CLI::ValidationError("--sizes: " + zeropage::memory::message_of(error));
  }
}

// "4KiB..64MiB" is every fourth power from one to the other; else the one size.
std::vector<int64_t> parse_sizes(const std::string& text) {
  const size_t dots = text.find(kRange);
  if (dots == std::string::npos) return {parse_size(text)};
  const int64_t first = parse_size(text.substr(0, dots));
  const int64_t last = parse_size(text.substr(dots + std::string(kRange).size()));
  require(first > 0 && first <= last, "--sizes " + text + ": expected FIRST..LAST, both above 0");
  std::vector<int64_t> sizes;
  for (int64_t size = first; size <= last; size *= kSizeFactor) sizes.push_back(size);
  return sizes;
}

void parse_all_sizes(const std::vector<std::string>& texts, Flags& flags) {
  for (const std::string& text : texts) {
    const std::vector<int64_t> parsed = parse_sizes(text);
    flags.sizes_bytes.insert(flags.sizes_bytes.end(), parsed.begin(), parsed.end());
  }
  for (const int64_t bytes : flags.sizes_bytes) {
    require(bytes > 0 && bytes % (kElementBytes * flags.ranks) == 0,
            c10::str("--sizes: ", bytes, " bytes of fp32 do not divide into ", flags.ranks,
                     " slices; choose multiples of ", kElementBytes * flags.ranks));
  }
}

}  // namespace

std::vector<Case> cases(const Flags& flags) {
  std::vector<Case> all;
  for (const std::string& text : flags.operations) {
    const auto* const at = std::find(kOperationNames.begin(), kOperationNames.end(), text);
    const auto operation = static_cast<Operation>(at - kOperationNames.begin());
    if (operation == Operation::kBarrier) {
      all.push_back({operation, 0});
      continue;
    }
    for (const int64_t bytes : flags.sizes_bytes) all.push_back({operation, bytes});
  }
  return all;
}

void add_flags(CLI::App& app, Flags& flags) {
  flags.operations.assign(kOperationNames.begin(), kOperationNames.end());
  app.add_option("--ranks", flags.ranks, "Ranks of this host")
      ->check(CLI::Range(2, kMostRanks))
      ->capture_default_str();
  app.add_option("--operations", flags.operations, "Operations to measure")
      ->delimiter(',')
      ->check(CLI::IsMember(flags.operations))
      ->capture_default_str();
  auto sizes = std::make_shared<std::vector<std::string>>(1, "4KiB..64MiB");
  app.add_option("--sizes", *sizes,
                 "Bytes of the whole tensor: sizes, or FIRST..LAST, each 4 times the one before")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--transports", flags.transports, "Transports to compare, in this order")
      ->delimiter(',')
      ->check(CLI::IsMember(flags.transports))
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "Times that every figure is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--json", flags.json,
                 "File for every figure of every round, or - for stdout, with the text on stderr");
  app.callback([sizes, &flags] { parse_all_sizes(*sizes, flags); });
}

}  // namespace collectives
