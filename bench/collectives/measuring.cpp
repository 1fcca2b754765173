// Google Benchmark registers, chooses the iterations and runs; time is ours to measure
// (UseManualTime), as it is that of the slowest rank. Its repetitions are not used: they run one
// after the other, or shuffled among all benchmarks, and a ratio needs neighbours. So every round
// of every transport is a benchmark of its own, registered in the order in which they shall run.
#include "bench/collectives/measuring.h"

#include <array>
#include <benchmark/benchmark.h>
#include <string>
#include <utility>

#include "memory/check.h"

namespace collectives {
namespace {

// Long against starting together, short against a machine that drifts.
constexpr double kLeastSeconds = 0.02;

// Takes the runs in their order instead of printing them.
class Collector : public benchmark::BenchmarkReporter {
 public:
  explicit Collector(std::function<void(const Run&)> take) : take_(std::move(take)) {}

  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) take_(run);
  }

 private:
  std::function<void(const Run&)> take_;
};

void register_one(Team& team, const Case& measured, size_t transport) {
  const std::string name = c10::str(collectives::name(measured.operation), "/", measured.bytes, "/",
                                    team.transports()[transport]);
  benchmark::RegisterBenchmark(
      name.c_str(),
      [&team, measured, transport](benchmark::State& state) {
        const auto iterations = static_cast<int64_t>(state.max_iterations);
        const double seconds = team.time(measured, transport, iterations);
        for ([[maybe_unused]] const auto iteration : state) {
          state.SetIterationTime(seconds / static_cast<double>(iterations));
        }
      })
      ->UseManualTime()
      ->MinTime(kLeastSeconds);
}

std::vector<Measurement> unmeasured(const Team& team, const Case& measured) {
  std::vector<Measurement> row;
  for (const std::string& transport : team.transports()) {
    row.push_back({.ranks = team.size(), .measured = measured, .transport = transport});
  }
  return row;
}

}  // namespace

void measure(Team& team, const Flags& flags,
             const std::function<void(const std::vector<Measurement>&)>& finished) {
  const size_t transports = team.transports().size();
  const auto rounds = static_cast<size_t>(flags.rounds);
  const std::vector<Case> all = cases(flags);
  for (const Case& measured : all) {
    for (size_t transport = 0; transport < transports; ++transport) {
      team.verify(measured, transport);
    }
    for (size_t i = 0; i < rounds * transports; ++i) register_one(team, measured, i % transports);
  }

  size_t runs = 0;
  std::vector<Measurement> row;
  Collector collector([&](const benchmark::BenchmarkReporter::Run& run) {
    const size_t in_case = runs % (rounds * transports);
    if (in_case == 0) row = unmeasured(team, all[runs / (rounds * transports)]);
    Measurement& measurement = row[in_case % transports];
    measurement.seconds.rounds.push_back(run.real_accumulated_time /
                                         static_cast<double>(run.iterations));
    measurement.iterations.push_back(run.iterations);
    ++runs;
    if (in_case + 1 == rounds * transports) finished(row);
  });
  std::string program = "collectives";
  std::array<char*, 2> arguments = {program.data(), nullptr};
  int count = 1;
  benchmark::Initialize(&count, arguments.data());
  benchmark::RunSpecifiedBenchmarks(&collector, ".");
  TORCH_INTERNAL_ASSERT(runs == all.size() * rounds * transports,
                        "Google Benchmark left benchmarks out");
}

}  // namespace collectives
