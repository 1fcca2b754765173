// Charts as SVG, for the pictures that examples write: panels beside each other, each with axes, lines, dots and bars.
//
//   charts::Panel loss{.title = "loss", .x = {.label = "epoch"}, .series = {{.name = "training", .points = {{0, 2.3}, {1, 0.7}}}}};
//   file << charts::svg({loss});
//
// Values that are not finite are left out. Series of one name have one colour in all panels, and one entry in the legend.
#pragma once

#include <string>
#include <vector>

namespace charts {

struct Point {
  double x = 0;
  double y = 0;
};

enum class Mark { kLine, kDashes, kDots, kLineAndDots, kBars };

struct Series {
  std::string name;
  std::vector<Point> points = {};
  Mark mark = Mark::kLine;
};

enum class Scale {
  kLinear,
  kLog2,   // ticks at powers of two
  kLog10,  // at powers of ten
};

struct Axis {
  std::string label = {};
  std::string unit = {};  // behind the highest tick
  Scale scale = Scale::kLinear;
  // Text below each bar, from 0 on; empty: numbers.
  std::vector<std::string> names = {};
};

struct Panel {
  std::string title;
  Axis x = {};
  Axis y = {};
  std::vector<Series> series = {};
};

std::string svg(const std::vector<Panel>& panels);

}  // namespace charts
