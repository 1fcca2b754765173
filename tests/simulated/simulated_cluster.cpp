// Runs short trainings on simulated clusters, with faults that a seed chooses, until a time or a number of them has passed.
// `simulated_cluster --help`.
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <thread>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "tests/simulated/cluster.h"
#include "tests/simulated/verdict.h"

namespace zeropage::simulated {
namespace {

struct Flags {
  double seconds = 60;
  uint64_t runs = UINT64_MAX;
  uint64_t seed = 1;
  int at_once = 0;
  bool keeps_going = false;
  bool shows_runs = false;
  bool shows_ranks = false;
  std::string plant;
};

constexpr int kEndings = 3;

// The seeds of the runs that are under way, 0: none, for the signal handler.
constexpr size_t kMostAtOnce = 64;
std::array<std::atomic<uint64_t>, kMostAtOnce> under_way{};

void say_seeds_and_end(int signal) {
  constexpr const char* kWords = "crash in one of the runs with --seed";
  static_cast<void>(!::write(STDOUT_FILENO, kWords, std::strlen(kWords)));
  for (const auto& seed : under_way) {
    if (seed == 0) continue;
    std::array<char, 24> digits{};
    size_t at = digits.size();
    for (uint64_t left = seed; left > 0; left /= 10)
      digits[--at] = static_cast<char>('0' + left % 10);
    digits[--at] = ' ';
    static_cast<void>(!::write(STDOUT_FILENO, &digits[at], digits.size() - at));
  }
  static_cast<void>(!::write(STDOUT_FILENO, "\n", 1));
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

class Search {
 public:
  explicit Search(const Flags& flags) : flags_(flags) {}

  // The program's exit code.
  int run() {
    {
      std::vector<std::jthread> workers;
      for (int worker = 0; worker < flags_.at_once; ++worker)
        workers.emplace_back([this, worker] { work(worker); });
    }
    print_table();
    return failures_ > 0 ? 1 : 0;
  }

 private:
  void work(int worker) {
    while (seconds() < flags_.seconds && (failures_ == 0 || flags_.keeps_going)) {
      const uint64_t number = next_++;
      if (number >= flags_.runs) return;
      RunPlan plan = plan_of(flags_.seed + number);
      if (!flags_.plant.empty()) plant_stale_generation(plan);
      under_way[static_cast<size_t>(worker)] = plan.seed;
      const Outcome outcome = run_on_cluster(plan);
      note(plan, outcome, verdict_on(plan, outcome));
      under_way[static_cast<size_t>(worker)] = 0;
    }
  }

  void note(const RunPlan& plan, const Outcome& outcome, const Verdict& verdict) {
    const std::lock_guard lock(mutex_);
    ++runs_;
    lost_steps_ += outcome.lost_steps;
    generations_ += outcome.generations;
    const auto ending = static_cast<size_t>(verdict.is);
    ++endings_[ending];
    bool is_quiet = true;
    for (size_t number = 0; number < plan.faults.size(); ++number) {
      if (!outcome.happened[number]) continue;
      is_quiet = false;
      ++by_kind_[static_cast<size_t>(plan.faults[number].kind)][ending];
    }
    if (is_quiet) ++quiet_[ending];
    if (is_quiet && outcome.generations > 0) ++spurious_;
    if (flags_.shows_runs) show(plan, outcome, verdict);
    if (verdict.is != Verdict::Is::kFailure) return;
    ++failures_;
    if (!flags_.shows_runs) show(plan, outcome, verdict);
    std::printf("replay: simulated_cluster --runs 1 --show-runs --seed %llu%s\n",
                static_cast<unsigned long long>(plan.seed),
                flags_.plant.empty() ? "" : (" --plant " + flags_.plant).c_str());
    std::fflush(stdout);
    if (outcome.hung.empty()) return;
    print_table();
    std::fflush(stdout);
    std::_Exit(1);
  }

  static void show(const RunPlan& plan, const Outcome& outcome, const Verdict& verdict) {
    constexpr std::array<const char*, kEndings> kWords = {"the same bits", "a named error",
                                                          "FAILURE"};
    std::printf("seed %llu, %.2f s, %s: %s\n  %s\n", static_cast<unsigned long long>(plan.seed),
                outcome.seconds, kWords[static_cast<size_t>(verdict.is)], verdict.words.c_str(),
                plan.words().c_str());
    for (const std::string& begin : outcome.begins) std::printf("  %s\n", begin.c_str());
    std::fflush(stdout);
  }

  void print_table() const {
    std::printf("%-14s %8s %10s %12s %8s\n", "fault", "happened", "same bits", "named error",
                "failure");
    const auto line = [](const char* what, const std::array<int64_t, kEndings>& of) {
      std::printf("%-14s %8lld %10lld %12lld %8lld\n", what,
                  static_cast<long long>(of[0] + of[1] + of[2]), static_cast<long long>(of[0]),
                  static_cast<long long>(of[1]), static_cast<long long>(of[2]));
    };
    for (int kind = 0; kind < kFaultKinds; ++kind) {
      line(name(static_cast<FaultKind>(kind)), by_kind_[static_cast<size_t>(kind)]);
    }
    line("none", quiet_);
    std::printf(
        "%lld runs in %.1f s (%.1f a second): %lld ended with the same bits, %lld with a named "
        "error, %lld failed; %lld restarts, %lld of them in runs without a fault; %lld steps lost; "
        "seeds from %llu\n",
        static_cast<long long>(runs_), seconds(), static_cast<double>(runs_) / seconds(),
        static_cast<long long>(endings_[0]), static_cast<long long>(endings_[1]),
        static_cast<long long>(endings_[2]), static_cast<long long>(generations_),
        static_cast<long long>(spurious_), static_cast<long long>(lost_steps_),
        static_cast<unsigned long long>(flags_.seed));
    std::fflush(stdout);
  }

  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

  const Flags flags_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::atomic<uint64_t> next_{0};
  std::atomic<int64_t> failures_{0};
  std::mutex mutex_;
  // Guarded by mutex_.
  int64_t runs_ = 0, lost_steps_ = 0, generations_ = 0, spurious_ = 0;
  std::array<int64_t, kEndings> endings_{}, quiet_{};
  std::array<std::array<int64_t, kEndings>, kFaultKinds> by_kind_{};
};

// What ranks say of each other's ends is thousands of lines.
void silence_ranks() {
  const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere >= 0) ::dup2(nowhere, STDERR_FILENO);
}

}  // namespace
}  // namespace zeropage::simulated

int main(int argc, char** argv) {
  zeropage::simulated::Flags flags;
  CLI::App app(
      "Short trainings on simulated clusters: ranks are threads, and die, stop, lose their "
      "connections and their disks at places that a seed chooses. Ends at the first run that has "
      "neither the bits of an unbroken one nor an error that its faults explain, with exit code "
      "1.");
  app.add_option("--seconds", flags.seconds, "Begins no run after so many")->capture_default_str();
  app.add_option("--runs", flags.runs, "Makes no more than so many runs");
  app.add_option("--seed", flags.seed, "The first run's; the next ones follow")
      ->capture_default_str();
  app.add_option("--at-once", flags.at_once,
                 "Runs at the same time; they mostly wait. Default: 2 for each core")
      ->check(CLI::Range(1, static_cast<int>(zeropage::simulated::kMostAtOnce)));
  app.add_flag("--keep-going", flags.keeps_going, "Does not end at a failure");
  app.add_flag("--show-runs", flags.shows_runs, "Says of each run what happened and how it ended");
  app.add_flag("--show-ranks", flags.shows_ranks, "Shows what the ranks write to stderr");
  app.add_option("--plant", flags.plant,
                 "A fault of the library that must be found: in stale-generation a rank reads keys "
                 "of the former generation")
      ->check(CLI::IsMember({"stale-generation"}));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (flags.at_once < 1) {
    flags.at_once = 2 * static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  }
  if (!flags.shows_ranks) zeropage::simulated::silence_ranks();
  for (const int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE}) {
    ::signal(signal, zeropage::simulated::say_seeds_and_end);
  }
  zeropage::simulated::simulate_disks();
  return zeropage::simulated::Search(flags).run();
}
