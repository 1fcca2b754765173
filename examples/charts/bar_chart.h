// Bars in groups: a group for each thing that was measured, and in it a bar for each side that measured it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "examples/charts/svg.h"

namespace charts {

// Of several measurements.
struct Bar {
  double value = 0;
  double least = 0, most = 0;  // drawn as a line
};

struct BarGroup {
  std::string label;
  std::vector<std::optional<Bar>> bars;  // [sides]; none: this side has no such figure
};

struct BarChart {
  std::string title;
  std::string unit;
  std::vector<std::string> sides;  // a legend, if there are several
  std::vector<BarGroup> groups;
};

inline constexpr double kBarChartHeight = 340;
double width_of(const BarChart& chart);

// left: where the chart begins in the picture; it is kBarChartHeight high.
void draw(Svg& svg, const BarChart& chart, double left);

}  // namespace charts
