#include "all_reduce_shapes/chart.h"

#include <functional>

#include <zeropage/bytes.h>

#include "charts/chart.h"

namespace all_reduce_shapes {
namespace {

using Value = std::function<double(const Cost&)>;

std::vector<charts::Point> points_of(const std::map<int, Cost>& costs, const Value& value) {
  std::vector<charts::Point> points;
  for (const auto& [ranks, cost] : costs) {
    points.push_back({static_cast<double>(ranks), value(cost)});
  }
  return points;
}

charts::Panel panel(const std::string& title, const std::string& unit, const Figures& figures,
                    const Value& value) {
  charts::Panel made{.title = title,
                     .x = {.label = "ranks", .scale = charts::Scale::kLog2},
                     .y = {.unit = unit, .scale = charts::Scale::kLog10}};
  for (const Shape shape : kShapes) {
    // Halving puts as much on a link as a ring, whose line shows through.
    const bool shares_line = shape == Shape::kHalving;
    made.series.push_back({.name = name(shape),
                           .points = points_of(figures.modelled.at(shape), value),
                           .mark = shares_line ? charts::Mark::kDashes : charts::Mark::kLine});
    made.series.push_back({.name = name(shape),
                           .points = points_of(figures.measured.at(shape), value),
                           .mark = charts::Mark::kDots});
  }
  return made;
}

}  // namespace

std::string svg(const Options& options, const Figures& figures) {
  const Value mebibytes = [](const Cost& cost) {
    return static_cast<double>(cost.busiest_bytes) / (1 << 20);
  };
  const Value milliseconds = [](const Cost& cost) { return cost.seconds * 1e3; };
  return charts::svg(
      {panel("bytes at the busiest link, all_reduce of " +
                 zeropage::memory::format_bytes(options.bytes),
             "MiB", figures, mebibytes),
       panel("time: lines are modelled, dots measured", "ms", figures, milliseconds)});
}

}  // namespace all_reduce_shapes
