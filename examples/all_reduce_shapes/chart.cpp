#include "examples/all_reduce_shapes/chart.h"

#include <cmath>
#include <functional>
#include <sstream>

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
  Panel(std::ostringstream& out, double left, const Figures& figures, Value value)
      : out_(out), left_(left), figures_(figures), value_(std::move(value)) {
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
    text(left_, kTop - 14, title, "start", 13);
    for (double power = low_; power <= high_; ++power) {
      const double at = y(std::pow(10, power));
      line(left_, at, left_ + kWidth, at, "#dddddd");
      std::ostringstream label;
      label << std::pow(10, power) << (power == high_ ? " " + unit : "");
      text(left_ - 6, at + 4, label.str(), "end", 10);
    }
    for (int ranks = 2; ranks <= kMostModelledRanks; ranks *= 2) {
      text(x(ranks), kTop + kHeight + 16, std::to_string(ranks), "middle", 10);
    }
    text(left_ + kWidth / 2, kTop + kHeight + 34, "ranks", "middle", 11);
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
    out_ << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << color << '"'
         << dashes_of(shape) << " points=\"";
    for (const auto& [ranks, cost] : figures_.modelled.at(shape)) {
      out_ << x(ranks) << ',' << y(value_(cost)) << ' ';
    }
    out_ << "\"/>\n";
    for (const auto& [ranks, cost] : figures_.measured.at(shape)) {
      out_ << "<circle r=\"" << (shape == Shape::kHalving ? 2.5 : 4.5) << "\" fill=\"" << color
           << "\" cx=\"" << x(ranks) << "\" cy=\"" << y(value_(cost)) << "\"/>\n";
    }
  }
  void line(double x1, double y1, double x2, double y2, const char* color) {
    out_ << "<line x1=\"" << x1 << "\" y1=\"" << y1 << "\" x2=\"" << x2 << "\" y2=\"" << y2
         << "\" stroke=\"" << color << "\"/>\n";
  }
  void text(double x, double y, const std::string& words, const char* anchor, int size) {
    out_ << "<text x=\"" << x << "\" y=\"" << y << "\" text-anchor=\"" << anchor
         << "\" font-size=\"" << size << "\">" << words << "</text>\n";
  }

  std::ostringstream& out_;
  const double left_;
  const Figures& figures_;
  const Value value_;
  double low_ = 0;
  double high_ = 0;
};

}  // namespace

std::string svg(const Options& options, const Figures& figures) {
  std::ostringstream out;
  out.precision(4);
  out << R"(<svg xmlns="http://www.w3.org/2000/svg" width="980" height="390" font-family="sans-serif">)"
      << "\n<rect width=\"980\" height=\"390\" fill=\"white\"/>\n";
  Panel(out, kLeft, figures,
        [](const Cost& cost) { return static_cast<double>(cost.busiest_bytes) / (1 << 20); })
      .draw("bytes at the busiest link, all_reduce of " +
                zeropage::memory::format_bytes(options.bytes),
            "MiB");
  Panel(out, kLeft + kApart, figures, [](const Cost& cost) {
    return cost.seconds * 1e3;
  }).draw("time: lines are modelled, dots measured", "ms");
  double at = kLeft;
  for (const Shape shape : kShapes) {
    out << "<text x=\"" << at << "\" y=\"375\" font-size=\"13\" fill=\"" << color_of(shape)
        << "\">&#9632; " << name(shape) << "</text>\n";
    at += 110;
  }
  out << "</svg>\n";
  return out.str();
}

}  // namespace all_reduce_shapes
