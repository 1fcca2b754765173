// Runs random training scripts by this library and by LibTorch alone until a time or a number of them has
// passed. `random_scripts --help`.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>

#include <CLI/CLI.hpp>

#include "tests/scripts/random_script.h"
#include "tests/scripts/shrink.h"
#include "tests/scripts/verdict.h"

namespace zeropage::scripts {
namespace {

struct Flags {
  double seconds = 60;
  uint64_t seed = 1;
  uint64_t scripts = UINT64_MAX;
  std::string file;
  bool goes_on = false;
  bool shrinks = true;
  bool shows_refusals = false;
};

class Search {
 public:
  explicit Search(const Flags& flags) : flags_(flags) {}

  // The program's exit code.
  int run() {
    if (!flags_.file.empty()) return run_file();
    for (uint64_t script = 0; script < flags_.scripts && seconds() < flags_.seconds; ++script) {
      const uint64_t seed = flags_.seed + script;
      judge(seed, random_script(seed));
      if (faults_ > 0 && !flags_.goes_on) break;
      if (seconds() > next_progress_) {
        progress();
        next_progress_ = seconds() + 10;
      }
    }
    progress();
    for (const auto& [words, count] : refusals_) {
      if (flags_.shows_refusals) std::printf("%6d refused: %s\n", count, words.c_str());
    }
    return faults_ > 0 ? 1 : 0;
  }

 private:
  int run_file() {
    std::ifstream in(flags_.file);
    if (!in) {
      std::fprintf(stderr, "--script %s: cannot be read\n", flags_.file.c_str());
      return 2;
    }
    std::string line;
    while (std::getline(in, line)) {
      if (!line.empty()) judge(0, script_of(line));
    }
    progress();
    return faults_ > 0 ? 1 : 0;
  }

  void judge(uint64_t seed, const Script& script) {
    const Verdict verdict = verdict_of(script);
    ++scripts_;
    steps_ += verdict.steps;
    ++counts_[verdict.is];
    if (verdict.is == Verdict::Is::kRefused) ++refusals_[verdict.words.substr(0, 160)];
    if (!verdict.is_fault()) return;
    ++faults_;
    std::printf("\nseed %llu, script %lld: %s\n%s\n", static_cast<unsigned long long>(seed),
                static_cast<long long>(scripts_), verdict.words.c_str(), to_text(script).c_str());
    std::fflush(stdout);
    if (!flags_.shrinks) return;
    const auto is_still = [&](const Script& smaller) {
      if (can_be_noticed(script) && !can_be_noticed(smaller)) return false;
      const Verdict of_it = verdict_of(smaller);
      return of_it.is == verdict.is && (of_it.is == Verdict::Is::kDifferent ||
                                        of_it.words.substr(0, 30) == verdict.words.substr(0, 30));
    };
    const Script least = shrunk(script, is_still);
    std::printf("The same fault in a smaller script: %s\n%s\n\n", verdict_of(least).words.c_str(),
                to_text(least).c_str());
    std::fflush(stdout);
  }

  void progress() const {
    const auto count = [&](Verdict::Is is) {
      const auto found = counts_.find(is);
      return found == counts_.end() ? 0 : found->second;
    };
    std::printf(
        "%lld scripts in %.0f s: %d alike over %lld steps, %d refused, %d diverged, %lld "
        "faults; seeds from %llu\n",
        static_cast<long long>(scripts_), seconds(), count(Verdict::Is::kAlike),
        static_cast<long long>(steps_), count(Verdict::Is::kRefused), count(Verdict::Is::kDiverged),
        static_cast<long long>(faults_), static_cast<unsigned long long>(flags_.seed));
    std::fflush(stdout);
  }

  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

  const Flags flags_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double next_progress_ = 10;
  int64_t scripts_ = 0, steps_ = 0, faults_ = 0;
  std::map<Verdict::Is, int> counts_;
  std::map<std::string, int> refusals_;
};

}  // namespace
}  // namespace zeropage::scripts

int main(int argc, char** argv) {
  zeropage::scripts::Flags flags;
  CLI::App app(
      "Random training scripts, by this library and by LibTorch alone. Ends at the first one "
      "that differs, prints it, and a smaller one with the same fault.");
  app.add_option("--seconds", flags.seconds, "Begins no script after so many")
      ->capture_default_str();
  app.add_option("--scripts", flags.scripts, "Runs no more than so many");
  app.add_option("--seed", flags.seed, "The first script's; the next ones follow")
      ->capture_default_str();
  app.add_option("--script", flags.file, "Runs the scripts of this file, one a line, instead");
  app.add_flag("--shrink,!--no-shrink", flags.shrinks, "Looks for a smaller script with the fault");
  app.add_flag("--keep-going", flags.goes_on, "Does not end at a fault");
  app.add_flag("--refusals", flags.shows_refusals, "Lists what was refused, and how often");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return zeropage::scripts::Search(flags).run();
}
