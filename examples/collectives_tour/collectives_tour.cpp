// What each operation between ranks does: on four ranks, values before and after; then which transport has which operation, found by
// running all of them.
//
//   collectives_tour
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "collectives_tour/operations.h"
#include "command_line/command_line.h"

namespace collectives_tour {
namespace {

using zeropage::Transport;
using zeropage::World;

std::string text_of(const torch::Tensor& values) {
  std::string text;
  for (int64_t i = 0; i < values.numel(); ++i) {
    const auto value = values[i].item<float>();
    const std::string number = value == kNothing ? "." : std::to_string(std::lround(value));
    text += std::string(5 - number.size(), ' ') + number;
  }
  return text;
}

void show(World& world) {
  for (const Operation& operation : operations()) {
    const Values values = operation.run(world);
    TORCH_CHECK(torch::equal(values.after, values.expected), operation.name, ": rank ",
                world.rank(), " expected", text_of(values.expected), ", got",
                text_of(values.after));
    const auto before = world.gather_text("before", text_of(values.before));
    const auto after = world.gather_text("after", text_of(values.after));
    if (world.rank() != 0) continue;
    std::printf("%s: %s\n", operation.name.c_str(), operation.what.c_str());
    for (size_t rank = 0; rank < before.size() && values.before.numel() > 0; ++rank) {
      std::printf("  rank %zu  %-*s  ->%s\n", rank, 5 * world.size(), before[rank].c_str(),
                  after[rank].c_str());
    }
    std::printf("\n");
  }
}

struct Way {
  const char* name;
  Transport transport;
  c10::DeviceType device;
  std::vector<std::string> hosts;  // by rank; none: one
};

// "" where all ranks have the right values, else why not.
std::string problem_of(const Way& way, const Operation& operation, int ranks) {
  try {
    World::threads(ranks,
                   [&](World& world) {
                     const Values values = operation.run(world);
                     TORCH_CHECK(torch::equal(values.after, values.expected), "wrong values");
                   },
                   {.device = way.device, .transport = way.transport}, {.hosts = way.hosts});
  } catch (const std::exception& error) {
    return zeropage::message_of(error);
  }
  return "";
}

std::vector<Way> ways_of(int ranks) {
  std::vector<std::string> two_hosts;
  for (int rank = 0; rank < ranks; ++rank) two_hosts.push_back(2 * rank < ranks ? "a" : "b");
  return {{"gloo", Transport::kGloo, torch::kCPU, {}},
          {"shared memory", Transport::kShared, torch::kCPU, {}},
          {"two hosts", Transport::kAuto, torch::kCPU, two_hosts},
          {"staged", Transport::kShared, torch::kCUDA, {}},
          {"nccl", Transport::kNccl, torch::kCUDA, {}}};
}

// Prints the table. Returns how many operations failed on the host, where all must work.
int try_transports(int ranks) {
  const std::vector<Way> ways = ways_of(ranks);
  const auto row = [&](const std::string& name, const auto& cell_of) {
    std::printf("%-16s", name.c_str());
    for (const Way& way : ways) std::printf(" %-13s", cell_of(way));
    std::printf("\n");
  };
  row("", [](const Way& way) { return way.name; });
  row("tensors on", [](const Way& way) { return way.device == torch::kCPU ? "cpu" : "cuda"; });
  int failed = 0;
  std::map<std::string, std::string> reasons;  // the first of each way
  for (const Operation& operation : operations()) {
    row(operation.name, [&](const Way& way) {
      const std::string problem = problem_of(way, operation, ranks);
      if (problem.empty()) return "x";
      reasons.emplace(way.name, problem);
      failed += way.device == torch::kCPU ? 1 : 0;
      return "-";
    });
  }
  for (const auto& [way, reason] : reasons)
    std::printf("\n- %s: %s\n", way.c_str(), reason.c_str());
  return failed;
}

}  // namespace
}  // namespace collectives_tour

int main(int argc, char** argv) {
  int ranks = 4;
  CLI::App app("What each operation between ranks does, and where it works");
  app.add_option("--ranks", ranks, "Ranks, which are threads of this process")
      ->check(CLI::Range(2, 16))
      ->capture_default_str();
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) return *ended;
  try {
    zeropage::World::threads(ranks, collectives_tour::show);
    return collectives_tour::try_transports(ranks) == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "collectives_tour: " << zeropage::message_of(error) << '\n';
    return 1;
  }
}
