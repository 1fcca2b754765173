#include "zeropage/probe.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "device/stream.h"
#include "offload/device_speed.h"
#include "planning/probe_within.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

using Clock = std::chrono::steady_clock;
using memory::operator""_MiB;
using planning::WithinProbe;

constexpr const char* kFlops = "FLOP/s";
constexpr const char* kBytesPerSecond = "B/s";
constexpr const char* kProduct = "matrix product";
constexpr const char* kCopy = "memory copy";
constexpr const char* kLink = "link";
constexpr int kLeastRepetitions = 3;

struct OwnFigure {
  const char* what;
  const char* unit;
  double figure;
};

double probed_seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// How long one repetition takes, to the end of what it enqueued.
double seconds_of_repetition(const at::Device& device, const char* what, const WithinProbe& within,
                             const std::function<void()>& run) {
  const auto begin = Clock::now();
  if (within) within(what);
  run();
  device::Stream::current(device).record().synchronize();
  return probed_seconds_since(begin);
}

// The fastest repetition's, so that what interrupts a rank for a moment does not count.
double fastest_seconds(const at::Device& device, const char* what, double seconds,
                       const WithinProbe& within, const std::function<void()>& run) {
  run();  // caches, and the library's choice of a kernel
  device::Stream::current(device).record().synchronize();
  double fastest = std::numeric_limits<double>::infinity();
  int repetitions = 0;
  for (const auto begin = Clock::now();
       probed_seconds_since(begin) < seconds || repetitions < kLeastRepetitions; ++repetitions) {
    fastest = std::min(fastest, seconds_of_repetition(device, what, within, run));
  }
  return fastest;
}

OwnFigure product_on_device(const at::Device& device, double seconds, const WithinProbe& within) {
  const int64_t size = device.is_cpu() ? 512 : 4096;
  const auto options = at::TensorOptions(device.is_cpu() ? at::kFloat : at::kBFloat16);
  const at::Tensor left = at::full({size, size}, 0.5, options.device(device));
  const at::Tensor right = at::full_like(left, 0.25);
  at::Tensor out = at::empty_like(left);
  const double each =
      fastest_seconds(device, kProduct, seconds, within, [&] { at::mm_out(out, left, right); });
  const auto n = static_cast<double>(size);
  return {kProduct, kFlops, 2 * n * n * n / each};
}

OwnFigure copy_on_device(const at::Device& device, double seconds, const WithinProbe& within) {
  const int64_t bytes = device.is_cpu() ? 64_MiB : 256_MiB;
  const at::Tensor from = at::zeros({bytes}, at::TensorOptions(at::kByte).device(device));
  at::Tensor to = at::zeros_like(from);
  const double each = fastest_seconds(device, kCopy, seconds, within, [&] { to.copy_(from); });
  return {kCopy, kBytesPerSecond, 2 * static_cast<double>(bytes) / each};
}

// Pairs of neighbours of a ring, in rounds in which each rank is in one pair at most: the first of each pair. An odd ring's
// last pair has a round of its own.
std::vector<std::vector<int>> rounds_of_ring(int ranks) {
  std::vector<std::vector<int>> rounds(2);
  for (int first = 0; first + 1 < ranks; ++first) {
    rounds[static_cast<size_t>(first % 2)].push_back(first);
  }
  if (ranks > 2 && ranks % 2 == 0) rounds[1].push_back(ranks - 1);
  if (ranks > 2 && ranks % 2 == 1) rounds.push_back({ranks - 1});
  return rounds;
}

// There and back: one direction at a time, so that neither rank waits for what the other has not begun.
void there_and_back(const comm::World& world, int other, bool is_first, const at::Tensor& tensor) {
  comm::Communicator& communicator = world.communicator();
  if (is_first) communicator.send(tensor, other, kLink).wait();
  communicator.recv(tensor, other, kLink).wait();
  if (!is_first) communicator.send(tensor, other, kLink).wait();
}

// Ranks make as many repetitions, whatever they take.
OwnFigure link_in_ring(const comm::World& world, const WithinProbe& within) {
  constexpr int kRepetitions = 5;
  const at::Device device = world.device();
  const int64_t bytes = device.is_cpu() ? 4_MiB : 64_MiB;
  const at::Tensor tensor = at::zeros({bytes}, at::TensorOptions(at::kByte).device(device));
  double best = 0;
  for (const std::vector<int>& round : rounds_of_ring(world.size())) {
    world.communicator().barrier(kLink).wait();
    for (const int first : round) {
      const int second = (first + 1) % world.size();
      if (world.rank() != first && world.rank() != second) continue;
      const bool is_first = world.rank() == first;
      const int other = is_first ? second : first;
      there_and_back(world, other, is_first, tensor);  // makes the connection
      for (int i = 0; i < kRepetitions; ++i) {
        const double each = seconds_of_repetition(
            device, kLink, within, [&] { there_and_back(world, other, is_first, tensor); });
        best = std::max(best, 2 * static_cast<double>(bytes) / each);
      }
    }
  }
  return {kLink, kBytesPerSecond, best};
}

void check_options(const ProbeOptions& options) {
  ZP_CHECK(options.slow_below > 0 && options.slow_below < 1,
           "ProbeOptions::slow_below: expected a part of the median, above 0 and below 1, got ",
           options.slow_below);
  ZP_CHECK(options.seconds > 0 && options.seconds <= 60,
           "ProbeOptions::seconds: expected more than 0 and at most 60, got ", options.seconds);
}

std::vector<OwnFigure> own_figures(const comm::World& world, const ProbeOptions& options,
                                   const WithinProbe& within) {
  const at::NoGradGuard no_grad;
  const at::Device device = world.device();
  const c10::DeviceGuard guard(device);
  std::vector<OwnFigure> own;
  own.push_back(product_on_device(device, options.seconds, within));
  own.push_back(copy_on_device(device, options.seconds, within));
  if (world.size() > 1) own.push_back(link_in_ring(world, within));
  if (!options.disk_directory.empty()) {
    const offload::DeviceSpeed disk =
        offload::measure(options.disk_directory, 32_MiB, 2 * options.seconds);
    own.push_back({"disk write", kBytesPerSecond, disk.write_bytes_per_second});
    own.push_back({"disk read", kBytesPerSecond, disk.read_bytes_per_second});
  }
  return own;
}

std::string in_words(double figure, const std::string& unit) {
  constexpr std::array<const char*, 5> kPrefixes = {"", "k", "M", "G", "T"};
  size_t prefix = 0;
  for (; figure >= 1000 && prefix + 1 < kPrefixes.size(); ++prefix) figure /= 1000;
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g %s", figure, kPrefixes[prefix]);
  return text.data() + unit;
}

}  // namespace

ProbeReport planning::probe_within(const comm::World& world, const ProbeOptions& options,
                                   const WithinProbe& within) {
  check_options(options);
  ZP_CHECK(!world.device().is_meta(), "probe(): a simulated world has no machine; leave it out");
  world.communicator().barrier("probe()").wait();
  const auto begin = Clock::now();
  const std::vector<OwnFigure> own = own_figures(world, options, within);
  std::ostringstream told;
  told.precision(17);
  for (const OwnFigure& of : own) told << of.figure << ' ';
  std::vector<std::vector<double>> by_rank;
  for (const std::string& text : world.gather_text("probe()", told.str())) {
    std::istringstream in(text);
    by_rank.emplace_back(std::istream_iterator<double>(in), std::istream_iterator<double>());
  }
  ProbeReport report;
  for (size_t index = 0; index < own.size(); ++index) {
    ProbeFigure figure{.what = own[index].what, .unit = own[index].unit};
    for (const auto& of_rank : by_rank) figure.by_rank.push_back(of_rank.at(index));
    figure.median = median_of(figure.by_rank);
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const double of_rank = figure.by_rank[rank];
      if (of_rank >= options.slow_below * figure.median) continue;
      report.slow.push_back(
          {static_cast<int>(rank), figure.what, figure.unit, of_rank, figure.median});
    }
    report.figures.push_back(std::move(figure));
  }
  report.seconds = world.max(probed_seconds_since(begin));
  return report;
}

ProbeReport probe(const comm::World& world, const ProbeOptions& options) {
  return planning::probe_within(world, options, nullptr);
}

std::string ProbeReport::to_string() const {
  std::ostringstream out;
  size_t ranks = 0;
  for (const ProbeFigure& of : figures) {
    ranks = of.by_rank.size();
    const auto [least, most] = std::minmax_element(of.by_rank.begin(), of.by_rank.end());
    out << of.what << ": " << in_words(of.median, of.unit);
    if (ranks > 1) {
      out << " in the median, " << in_words(*least, of.unit) << " on rank "
          << least - of.by_rank.begin() << ", " << in_words(*most, of.unit) << " on rank "
          << most - of.by_rank.begin();
    }
    out << '\n';
  }
  for (const SlowRank& of : slow) {
    out << "rank " << of.rank << " is slow: " << of.what << ' ' << in_words(of.figure, of.unit)
        << ", the median of " << ranks << " ranks is " << in_words(of.median, of.unit) << '\n';
  }
  return out.str();
}

}  // namespace zeropage
