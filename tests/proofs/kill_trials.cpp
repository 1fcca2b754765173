// Kills random ranks at random moments and judges what the others do. `--help` tells what and how.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>

#include "tests/proofs/kill_trial.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

constexpr const char* kHelp = R"(Usage: kill_trials [options]

Starts ranks that train a tiny model at a random stage or call all operations with random sizes, kills a
random one by SIGKILL from outside at a random moment, and judges the others:

  * each has one error, of one line, that names the rank that was killed ("lost rank 1"), its own operation
    and sequence number, or what the ranks were to agree on, within 2 s of the kill by its own clock;
  * each ends by itself: the launcher, which has 30 s of grace, ends none;
  * the launcher blames the rank that was killed;
  * no process of the ranks' sessions is left, and no new file in /dev/shm that nobody uses.

One trial in five kills while the ranks meet. If a rank had no world yet at that moment, the row "meeting",
the errors must name the missing rank within the deadline of 3 s, and 7 s in which rank 0 tells the others;
warnings that LibTorch prints by itself when the store dies are allowed there, and where ranks agree.

Options:
  --trials N             over all ranks and communicators together (200)
  --ranks LIST           sizes of the worlds, 2 to 16 (2,4)
  --communicators LIST   gloo, shared, auto (gloo)
  --while WHEN           any, or working: only once all ranks have a world (any)
  --seed S               the same seed draws the same trials, though not the same microseconds (1)
  --verbose              a line for each trial
  --help                 this text

Exit status: 0 if every trial is clean, 1 if not, 2 for a wrong command line.
)";

struct CommandLine {
  int trials = 200;
  std::vector<int> ranks = {2, 4};
  std::vector<std::string> communicators = {"gloo"};
  uint64_t seed = 1;
  bool only_working = false;
  bool verbose = false;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

comm::Transport transport_of(const std::string& name) {
  if (name == "gloo") return comm::Transport::kGloo;
  if (name == "shared") return comm::Transport::kShared;
  if (name == "auto") return comm::Transport::kAuto;
  ZP_THROW("--communicators: expected gloo, shared or auto, got ", name);
}

CommandLine parse(const std::vector<std::string>& arguments) {
  CommandLine line;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (name == "--verbose") {
      line.verbose = true;
      continue;
    }
    ZP_CHECK(i + 1 < arguments.size(), "expected a value after ", name, "; see --help");
    const std::string& value = arguments[++i];
    if (name == "--trials") {
      line.trials = std::stoi(value);
    } else if (name == "--seed") {
      line.seed = std::stoull(value);
    } else if (name == "--while") {
      ZP_CHECK(value == "any" || value == "working", "--while ", value,
               ": expected any or working");
      line.only_working = value == "working";
    } else if (name == "--communicators") {
      line.communicators = split(value);
      for (const std::string& communicator : line.communicators) transport_of(communicator);
    } else if (name == "--ranks") {
      line.ranks.clear();
      for (const std::string& ranks : split(value)) line.ranks.push_back(std::stoi(ranks));
    } else {
      ZP_THROW("no option ", name, "; see --help");
    }
  }
  ZP_CHECK(!line.ranks.empty() && !line.communicators.empty(),
           "expected at least one size and one "
           "communicator; see --help");
  return line;
}

struct Row {
  int trials = 0;
  int clean = 0;
  std::vector<double> latencies;
  double all_gone = 0;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print_table(const std::map<std::string, Row>& rows) {
  std::printf("\n%-26s %7s %7s %12s %12s %14s\n", "killed while", "trials", "clean", "median, ms",
              "worst, ms", "all gone, ms");
  for (const auto& [name, row] : rows) {
    const double worst =
        row.latencies.empty() ? 0 : *std::max_element(row.latencies.begin(), row.latencies.end());
    std::printf("%-26s %7d %7d %12.1f %12.1f %14.1f\n", name.c_str(), row.trials, row.clean,
                median(row.latencies), worst, row.all_gone);
  }
}

int run(const CommandLine& line) {
  std::map<std::string, Row> rows;
  int unclean = 0;
  for (int trial = 0; trial < line.trials; ++trial) {
    const auto index = static_cast<size_t>(trial);
    const std::string& communicator = line.communicators[index % line.communicators.size()];
    const KillPlan plan{.transport = transport_of(communicator),
                        .ranks = line.ranks[index / line.communicators.size() % line.ranks.size()],
                        .seed = line.seed * 1'000'003 + index,
                        .only_working = line.only_working};
    const KillResult result = run_kill_trial(plan);
    Row& row = rows[c10::str(communicator, ", ", plan.ranks, " ranks, ",
                             result.meeting ? "meeting" : "working")];
    ++row.trials;
    row.clean += result.faults.empty() ? 1 : 0;
    unclean += result.faults.empty() ? 0 : 1;
    row.latencies.insert(row.latencies.end(), result.latencies.begin(), result.latencies.end());
    row.all_gone = std::max(row.all_gone, result.all_gone);
    if (!result.faults.empty() || line.verbose) {
      std::printf("trial %d, %s: %s: %s\n", trial, communicator.c_str(), result.description.c_str(),
                  result.faults.empty() ? "clean" : "NOT CLEAN");
      for (const std::string& fault : result.faults) std::printf("  %s\n", fault.c_str());
      if (!result.faults.empty()) std::printf("---- output\n%s----\n", result.output.c_str());
    }
    if ((trial + 1) % 20 == 0) std::printf("%d of %d trials\n", trial + 1, line.trials);
    std::fflush(stdout);
  }
  print_table(rows);
  return unclean == 0 ? 0 : 1;
}

}  // namespace
}  // namespace zeropage

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (std::find(arguments.begin(), arguments.end(), "--help") != arguments.end()) {
    std::cout << zeropage::kHelp;
    return 0;
  }
  try {
    return zeropage::run(zeropage::parse(arguments));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kill_trials: %s\n", zeropage::memory::message_of(error).c_str());
    return 2;
  }
}
