#include "examples/all_reduce_shapes/chart.h"

#include <cmath>
#include <functional>
#include <sstream>

#include "examples/charts/svg.h"

namespace all_reduce_shapes {
namespace {

constexpr double kWidth = 380;
constexpr double kHeight = 260;
constexpr double kLeft = 60;
constexpr double kTop = 50;
constexpr double kApart = 490;  // from panel to panel

constexpr const char* color_of(Shape shape) {
  constexpr std::array<const char*, 4> kColors = {"#c0392b", "#d68910", "#1f618d", "#1e8449"};
  return kColors[static_cast<size_t>(shape)];
}

// Halving puts as much on a link as a ring, whose line shows through.
constexpr const char* dashes_of(Shape shape) {
  return shape == Shape::kHalving ? " stroke-dasharray=\"6 6\"" : "";
}

using Value = std::function<double(const Cost&)>;

// One panel; the values between powers of ten.
class Panel {
 public:
  Panel(charts::Svg& svg, double left, const Figures& figures, Value value)
      : svg_(svg), left_(left), figures_(figures), value_(std::move(value)) {
    double least = HUGE_VAL;
    double most = 0;
    for (const Costs* costs : {&figures.measured, &figures.modelled}) {
      for (const auto& [shape, of_shape] : *costs) {
        for (const auto& [ranks, cost] : of_shape) {
          least = std::min(least, value_(cost));
          most = std::max(most, value_(cost));
        }
      }
    }
    low_ = std::floor(std::log10(least));
    high_ = std::ceil(std::log10(most));
  }

  void draw(const std::string& title, const std::string& unit) {
    svg_.text({.x = left_, .y = kTop - 14, .size = 13}, title);
    for (double power = low_; power <= high_; ++power) {
      const double at = y(std::pow(10, power));
      svg_.line(left_, at, left_ + kWidth, at, "#dddddd");
      std::ostringstream label;
      label << std::pow(10, power) << (power == high_ ? " " + unit : "");
      svg_.text({.x = left_ - 6, .y = at + 4, .align = charts::Align::kEnd, .size = 10},
                label.str());
    }
    for (int ranks = 2; ranks <= kMostModelledRanks; ranks *= 2) {
      svg_.text(
          {.x = x(ranks), .y = kTop + kHeight + 16, .align = charts::Align::kMiddle, .size = 10},
          std::to_string(ranks));
    }
    svg_.text({.x = left_ + kWidth / 2, .y = kTop + kHeight + 34, .align = charts::Align::kMiddle},
              "ranks");
    for (const Shape shape : kShapes) draw_shape(shape);
  }

 private:
  double x(int ranks) const {
    return left_ + kWidth * (std::log2(ranks) - 1) / (std::log2(kMostModelledRanks) - 1);
  }
  double y(double value) const {
    return kTop + kHeight * (high_ - std::log10(value)) / (high_ - low_);
  }

  void draw_shape(Shape shape) {
    const char* color = color_of(shape);
    std::ostringstream out;
    out.precision(4);
    out << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << color << '"'
        << dashes_of(shape) << " points=\"";
    for (const auto& [ranks, cost] : figures_.modelled.at(shape)) {
      out << x(ranks) << ',' << y(value_(cost)) << ' ';
    }
    out << "\"/>";
    for (const auto& [ranks, cost] : figures_.measured.at(shape)) {
      out << "\n<circle r=\"" << (shape == Shape::kHalving ? 2.5 : 4.5) << "\" fill=\"" << color
          << "\" cx=\"" << x(ranks) << "\" cy=\"" << y(value_(cost)) << "\"/>";
    }
    svg_.add(out.str());
  }

  charts::Svg& svg_;
  const double left_;
  const Figures& figures_;
  const Value value_;
  double low_ = 0;
  double high_ = 0;
};

}  // namespace

std::string svg(const Options& options, const Figures& figures) {
  charts::Svg svg(980, 390);
  Panel(svg, kLeft, figures,
        [](const Cost& cost) { return static_cast<double>(cost.busiest_bytes) / (1 << 20); })
      .draw("bytes at the busiest link, all_reduce of " +
                zeropage::memory::format_bytes(options.bytes),
            "MiB");
  Panel(svg, kLeft + kApart, figures, [](const Cost& cost) {
    return cost.seconds * 1e3;
  }).draw("time: lines are modelled, dots measured", "ms");
  double at = kLeft;
  for (const Shape shape : kShapes) {
    svg.text({.x = at, .y = 375, .size = 13, .color = color_of(shape)},
             std::string("\u25a0 ") + name(shape));
    at += 110;
  }
  return svg.picture();
}

}  // namespace all_reduce_shapes
