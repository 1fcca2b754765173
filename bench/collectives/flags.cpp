#include "bench/collectives/flags.h"

#include <algorithm>
#include <set>

#include <CLI/CLI.hpp>

#include "memory/bytes.h"
#include "memory/check.h"

namespace collectives {
namespace {

constexpr int kUsageError = 2;
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

Operation parse_operation(const std::string& text) {
  const auto* const at = std::find(kOperationNames.begin(), kOperationNames.end(), text);
  return static_cast<Operation>(at - kOperationNames.begin());
}

template <typename Value>
void require_distinct(const std::string& flag, const std::vector<Value>& values) {
  require(std::set<Value>(values.begin(), values.end()).size() == values.size(),
          flag + ": the same value twice; name each once");
}

void check_values(const Flags& flags) {
  require_distinct("--ranks", flags.ranks);
  require_distinct("--operations", flags.operations);
  require_distinct("--sizes", flags.sizes_bytes);
  require_distinct("--transports", flags.transports);
  for (const int ranks : flags.ranks) {
    for (const int64_t bytes : flags.sizes_bytes) {
      require(bytes > 0 && bytes % (kElementBytes * ranks) == 0,
              c10::str("--sizes: ", bytes, " bytes of fp32 do not divide into ", ranks,
                       " slices; choose multiples of ", kElementBytes * ranks));
    }
  }
}

}  // namespace

std::vector<Case> cases(const Flags& flags) {
  std::vector<Case> all;
  for (const Operation operation : flags.operations) {
    if (operation == Operation::kBarrier) {
      all.push_back({operation, 0});
      continue;
    }
    for (const int64_t bytes : flags.sizes_bytes) all.push_back({operation, bytes});
  }
  return all;
}

std::optional<int> parse_flags(int argc, char** argv, Flags& flags) {
  CLI::App app(
      "Times collectives between the ranks of this host: ours over shared memory and Gloo, "
      "and c10d's ProcessGroupGloo, interleaved.");
  std::vector<std::string> operations(kOperationNames.begin(), kOperationNames.end());
  std::vector<std::string> sizes = {"4KiB..64MiB"};
  flags.transports = {"shared", "gloo", "c10d"};
  app.add_option("--ranks", flags.ranks, "numbers of ranks, each measured by itself")
      ->delimiter(',')
      ->check(CLI::Range(2, kMostRanks))
      ->capture_default_str();
  app.add_option("--operations", operations, "what to measure")
      ->delimiter(',')
      ->check(CLI::IsMember(operations))
      ->capture_default_str();
  app.add_option("--sizes", sizes,
                 "bytes of the whole tensor: sizes, or FIRST..LAST, each 4 times the one before")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--transports", flags.transports, "what to compare, in this order")
      ->delimiter(',')
      ->check(CLI::IsMember(flags.transports))
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "times that every figure is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  CLI::Option* json =
      app.add_option(
             "--json", flags.json,
             "write every figure to FILE; without FILE, or with -, to stdout, and the table "
             "to stderr")
          ->expected(0, 1)
          ->option_text("[FILE]");
  try {
    app.parse(argc, argv);
    if (json->count() > 0 && flags.json.empty()) flags.json = "-";
    for (const std::string& operation : operations) {
      flags.operations.push_back(parse_operation(operation));
    }
    for (const std::string& text : sizes) {
      const std::vector<int64_t> parsed = parse_sizes(text);
      flags.sizes_bytes.insert(flags.sizes_bytes.end(), parsed.begin(), parsed.end());
    }
    check_values(flags);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
}

}  // namespace collectives
