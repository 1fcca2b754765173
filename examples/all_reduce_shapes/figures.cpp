#include "all_reduce_shapes/figures.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

namespace all_reduce_shapes {
namespace {

using zeropage::comm::Operation;
using zeropage::comm::SimulatedCommunicator;
using zeropage::comm::Topology;
using Clock = std::chrono::steady_clock;

constexpr int64_t kElementBytes = 4;
constexpr int kPings = 50;
const zeropage::WorldOptions kMessages{.transport = zeropage::Transport::kGloo};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

template <typename Body>
double fastest(int repeats, const zeropage::World& world, const Body& body) {
  double seconds = std::numeric_limits<double>::max();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    world.communicator().barrier("a start").wait();
    const auto start = Clock::now();
    body();
    seconds = std::min(seconds, world.max(seconds_since(start)));
  }
  return seconds;
}

// One message's time.
double ping(const zeropage::World& world, int64_t numel, int repeats) {
  Wires wires(world);
  const at::Tensor tensor = torch::zeros({numel});
  return fastest(repeats, world,
                 [&] {
                   if (world.rank() == 0) wires.send(tensor, 1);
                   wires.receive(tensor, 1 - world.rank());
                   if (world.rank() == 1) wires.send(tensor, 0);
                 }) /
         2;
}

zeropage::comm::Link measure_link(const Options& options) {
  zeropage::comm::Link link;
  zeropage::World::threads(
      2,
      [&](zeropage::World& world) {
        const double shortest = ping(world, 1, kPings);
        const double longest = ping(world, options.bytes / kElementBytes, options.repeats);
        if (world.rank() != 0) return;
        link = {.latency_seconds = shortest,
                .bytes_per_second = static_cast<double>(options.bytes) / (longest - shortest)};
      },
      kMessages);
  return link;
}

std::map<Shape, Cost> measure(int ranks, const Options& options) {
  std::map<Shape, Cost> costs;
  zeropage::World::threads(
      ranks,
      [&](zeropage::World& world) {
        Wires wires(world);
        const at::Tensor tensor = torch::zeros({options.bytes / kElementBytes});
        for (const Shape shape : kShapes) {
          if (!works_for(shape, ranks)) continue;
          const int64_t sent_before = wires.sent_bytes();
          const int64_t received_before = wires.received_bytes();
          const double seconds = fastest(options.repeats, world, [&] {
            tensor.fill_(world.rank() + 1);
            all_reduce(shape, wires, tensor);
          });
          TORCH_CHECK(tensor.eq(ranks * (ranks + 1) / 2).all().item<bool>(), name(shape), " over ",
                      ranks, " ranks did not give the sum");
          const int64_t sent = wires.sent_bytes() - sent_before;
          const int64_t received = wires.received_bytes() - received_before;
          const double busiest =
              world.max(static_cast<double>(std::max(sent, received))) / options.repeats;
          if (world.rank() == 0) costs[shape] = {static_cast<int64_t>(busiest), seconds};
        }
      },
      kMessages);
  return costs;
}

Cost model(Shape shape, int ranks, const Options& options, const zeropage::comm::Link& link) {
  const zeropage::World world =
      zeropage::World::simulated({.topology = Topology::even(ranks, 1), .between_hosts = link});
  Wires wires(world);
  all_reduce(shape, wires, torch::empty({options.bytes / kElementBytes}, torch::kMeta));
  const auto seconds = [&](int lane) {
    return SimulatedCommunicator::of(wires.lane(lane).communicator())
        .figures()[Operation::kPair]
        .seconds;
  };
  return {std::max(wires.sent_bytes(), wires.received_bytes()), std::max(seconds(0), seconds(1))};
}

void print_row(std::string& text, const char* kind, int ranks, const Costs& costs) {
  std::array<char, 160> line{};
  std::string bytes;
  std::string times;
  for (const Shape shape : kShapes) {
    const auto& of_shape = costs.at(shape);
    const auto at = of_shape.find(ranks);
    const bool is_there = at != of_shape.end();
    std::snprintf(line.data(), line.size(), "%11.1f",
                  is_there ? static_cast<double>(at->second.busiest_bytes) / (1 << 20) : 0.0);
    bytes += is_there ? line.data() : "          -";
    std::snprintf(line.data(), line.size(), "%10.2f", is_there ? at->second.seconds * 1e3 : 0.0);
    times += is_there ? line.data() : "         -";
  }
  std::snprintf(line.data(), line.size(), "%5d  %-9s", ranks, kind);
  text += line.data() + bytes + " " + times + "\n";
}

}  // namespace

Figures find(const Options& options) {
  Figures figures{.link = measure_link(options), .measured = {}, .modelled = {}};
  for (int ranks = 2; ranks <= options.most_ranks; ranks *= 2) {
    for (const auto& [shape, cost] : measure(ranks, options)) figures.measured[shape][ranks] = cost;
  }
  for (int ranks = 2; ranks <= kMostModelledRanks; ranks *= 2) {
    for (const Shape shape : kShapes) {
      figures.modelled[shape][ranks] = model(shape, ranks, options, figures.link);
    }
  }
  return figures;
}

std::string table(const Options& options, const Figures& figures) {
  std::array<char, 200> line{};
  std::snprintf(line.data(), line.size(),
                "all_reduce of %s; a message takes %.0f us and its bytes at %.2f GB/s\n",
                zeropage::memory::format_bytes(options.bytes).c_str(),
                figures.link.latency_seconds * 1e6, figures.link.bytes_per_second / 1e9);
  std::string text = line.data();
  text +=
      "                  MiB at the busiest link                       milliseconds\n"
      "ranks                server       tree       ring    halving     server      tree      ring "
      "  "
      "halving\n";
  for (const auto& [ranks, cost] : figures.measured.at(Shape::kRing)) {
    print_row(text, "measured", ranks, figures.measured);
  }
  for (const auto& [ranks, cost] : figures.modelled.at(Shape::kRing)) {
    print_row(text, "modelled", ranks, figures.modelled);
  }
  return text;
}

}  // namespace all_reduce_shapes
