#include "examples/charts/bar_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace charts {
namespace {

constexpr double kTop = 64;
constexpr double kHeight = 220;  // of the tallest bar's room
constexpr double kAxis = 56;     // room for the numbers on the left
constexpr double kBarWidth = 34;
constexpr double kGap = 22;  // between groups
constexpr std::array<const char*, 3> kColors = {"#1f618d", "#d68910", "#1e8449"};

const char* color_of(size_t side) {
  return kColors[side % kColors.size()];
}

double group_width(const BarChart& chart) {
  return kBarWidth * static_cast<double>(chart.sides.size()) + kGap;
}

double highest(const BarChart& chart) {
  double most = 0;
  for (const BarGroup& group : chart.groups) {
    for (const auto& bar : group.bars) {
      if (bar) most = std::max({most, bar->value, bar->most});
    }
  }
  return most > 0 ? most : 1;
}

// Between lines of the axis: 1, 2 or 5 times a power of ten, for 4 to 10 lines.
double between_lines(double most) {
  const double power = std::pow(10, std::floor(std::log10(most / 4)));
  for (const double factor : {5.0, 2.0}) {
    if (most / (factor * power) >= 4) return factor * power;
  }
  return power;
}

std::string number(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.3g", value);
  return digits;
}

void draw_bar(Svg& svg, const Bar& bar, double x, double per_unit, const char* color) {
  const double bottom = kTop + kHeight;
  const auto y = [&](double value) { return bottom - value * per_unit; };
  svg.box(x, y(bar.value), kBarWidth - 4, bar.value * per_unit, color);
  const double middle = x + (kBarWidth - 4) / 2;
  if (bar.most > bar.least) svg.line(middle, y(bar.least), middle, y(bar.most), "black");
  svg.text(
      {.x = middle, .y = y(std::max(bar.value, bar.most)) - 4, .align = Align::kMiddle, .size = 10},
      number(bar.value));
}

}  // namespace

double width_of(const BarChart& chart) {
  return kAxis + kGap + group_width(chart) * static_cast<double>(chart.groups.size());
}

void draw(Svg& svg, const BarChart& chart, double left) {
  const double most = highest(chart), bottom = kTop + kHeight;
  const double right = left + width_of(chart);
  svg.text({.x = left + 8, .y = 22, .size = 13}, chart.title);
  double legend = left + kAxis;
  for (size_t side = 0; side < chart.sides.size() && chart.sides.size() > 1; ++side) {
    svg.box(legend, 32, 11, 11, color_of(side));
    svg.text({.x = legend + 16, .y = 42}, chart.sides[side]);
    legend += 36 + 7 * static_cast<double>(chart.sides[side].size());
  }
  const double step = between_lines(most);
  for (int line = 0; line * step <= most * (1 + 1e-9); ++line) {
    const double y = bottom - kHeight * line * step / most;
    svg.line(left + kAxis, y, right, y, "#dddddd");
    svg.text({.x = left + kAxis - 6, .y = y + 4, .align = Align::kEnd, .size = 10},
             number(line * step));
  }
  svg.text({.x = left + kAxis - 6, .y = kTop - 12, .align = Align::kEnd, .size = 10}, chart.unit);
  double x = left + kAxis + kGap;
  for (const BarGroup& group : chart.groups) {
    for (size_t side = 0; side < group.bars.size(); ++side) {
      if (!group.bars[side]) continue;
      draw_bar(svg, *group.bars[side], x + kBarWidth * static_cast<double>(side), kHeight / most,
               color_of(side));
    }
    svg.text({.x = x + (group_width(chart) - kGap) / 2, .y = bottom + 18, .align = Align::kMiddle},
             group.label);
    x += group_width(chart);
  }
}

}  // namespace charts
