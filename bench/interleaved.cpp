#include "bench/interleaved.h"

#include <array>
#include <benchmark/benchmark.h>
#include <chrono>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace bench {
namespace {

// Long against a launch, short against a machine that drifts.
constexpr double kLeastSeconds = 0.05;
constexpr int64_t kPreparedRuns = 10;

void synchronize(const c10::Device& device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

// Takes the runs in their order instead of printing them.
class Collector : public benchmark::BenchmarkReporter {
 public:
  explicit Collector(std::vector<Spread>& seconds) : seconds_(seconds) {}
  bool ReportContext(const Context& /*context*/) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      seconds_[count_++ % seconds_.size()].rounds.push_back(run.real_accumulated_time /
                                                            static_cast<double>(run.iterations));
    }
  }

 private:
  std::vector<Spread>& seconds_;
  size_t count_ = 0;
};

double seconds_of(const std::function<void()>& run, const c10::Device& device, int64_t runs) {
  synchronize(device);
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < runs; ++i) run();
  synchronize(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double seconds_of(const Contender& contender, const c10::Device& device, int64_t runs) {
  if (!contender.prepare) return seconds_of(contender.run, device, runs);
  double seconds = 0;
  for (int64_t i = 0; i < runs; ++i) {
    contender.prepare();
    seconds += seconds_of(contender.run, device, 1);
  }
  return seconds;
}

void time_one(benchmark::State& state, const TimedContender& contender) {
  const auto runs = static_cast<int64_t>(state.max_iterations);
  const double seconds = contender.seconds_of(runs);
  for ([[maybe_unused]] const auto iteration : state) {
    state.SetIterationTime(seconds / static_cast<double>(runs));
  }
}

}  // namespace

std::vector<Spread> time_interleaved(const std::vector<TimedContender>& all, int rounds) {
  benchmark::ClearRegisteredBenchmarks();
  for (int round = 0; round < rounds; ++round) {
    for (const TimedContender& contender : all) {
      auto* const registered = benchmark::RegisterBenchmark(
          contender.name.c_str(),
          [&contender](benchmark::State& state) { time_one(state, contender); });
      registered->UseManualTime();
      if (contender.runs > 0) {
        registered->Iterations(contender.runs);
      } else {
        registered->MinTime(kLeastSeconds);
      }
    }
  }
  std::vector<Spread> seconds(all.size());
  Collector collector(seconds);
  std::string program = "interleaved";
  std::array<char*, 2> arguments = {program.data(), nullptr};
  int count = 1;
  benchmark::Initialize(&count, arguments.data());
  benchmark::RunSpecifiedBenchmarks(&collector, ".");
  return seconds;
}

std::vector<Spread> time_interleaved(const std::vector<Contender>& all, const c10::Device& device,
                                     int rounds) {
  std::vector<TimedContender> timed;
  for (const Contender& contender : all) {
    if (contender.prepare) contender.prepare();
    contender.run();
    timed.push_back(
        {contender.name,
         [&contender, device](int64_t runs) { return seconds_of(contender, device, runs); },
         contender.prepare ? kPreparedRuns : 0});
  }
  return time_interleaved(timed, rounds);
}

}  // namespace bench
