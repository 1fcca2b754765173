#include "charts/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

namespace charts {
namespace {

constexpr double kWidth = 380;
constexpr double kHeight = 260;
constexpr double kLeft = 60;
constexpr double kTop = 50;
constexpr double kApart = 490;  // from panel to panel
constexpr double kAll = 390;    // the picture's height
constexpr double kBarsShare = 0.8;
constexpr std::array<const char*, 6> kColours = {"#c0392b", "#d68910", "#1f618d",
                                                 "#1e8449", "#7d3c98", "#566573"};

std::string escaped(const std::string& words) {
  std::string safe;
  for (const char letter : words) {
    if (letter == '&')
      safe += "&amp;";
    else if (letter == '<')
      safe += "&lt;";
    else if (letter == '"')
      safe += "&quot;";
    else
      safe += letter;
  }
  return safe;
}

// Where values of one axis are, from 0 to 1.
class Ruler {
 public:
  Ruler(const Axis& axis, double least, double most) : axis_(axis), low_(least), high_(most) {
    if (!(low_ <= high_)) low_ = 0, high_ = 1;  // no value
    if (axis.scale == Scale::kLinear) {
      if (low_ == high_) high_ = low_ + 1;
      step_ = round_step((high_ - low_) / 5);
      if (axis.names.empty()) {
        low_ = std::floor(low_ / step_) * step_;
        high_ = std::ceil(high_ / step_) * step_;
      }
    } else if (axis.scale == Scale::kLog10) {
      low_ = std::pow(10, std::floor(std::log10(low_)));
      high_ = std::pow(10, std::ceil(std::log10(high_)));
    }
    if (low_ == high_) high_ = low_ * 2;
  }

  bool takes(double value) const {
    return std::isfinite(value) && (axis_.scale == Scale::kLinear || value > 0);
  }
  double at(double value) const {
    if (axis_.scale == Scale::kLinear) return (value - low_) / (high_ - low_);
    return std::log(value / low_) / std::log(high_ / low_);
  }
  std::vector<double> ticks() const {
    std::vector<double> ticks;
    if (!axis_.names.empty()) {
      for (size_t i = 0; i < axis_.names.size(); ++i) ticks.push_back(static_cast<double>(i));
    } else if (axis_.scale == Scale::kLinear) {
      const auto count = static_cast<int>(std::llround((high_ - low_) / step_));
      for (int i = 0; i <= count; ++i) ticks.push_back(low_ + i * step_);
    } else {
      const double times = axis_.scale == Scale::kLog2 ? 2 : 10;
      for (double tick = low_; tick <= high_ * 1.0001; tick *= times) ticks.push_back(tick);
    }
    return ticks;
  }
  std::string label(double tick, bool is_last) const {
    if (!axis_.names.empty()) return escaped(axis_.names[static_cast<size_t>(tick)]);
    std::ostringstream text;
    text.precision(6);
    text << (std::abs(tick) < step_ / 1000 ? 0.0 : tick);
    if (is_last && !axis_.unit.empty()) text << ' ' << escaped(axis_.unit);
    return text.str();
  }

 private:
  // 1, 2 or 5 times a power of ten, not below `step`.
  static double round_step(double step) {
    const double power = std::pow(10, std::floor(std::log10(step)));
    for (const double times : {1.0, 2.0, 5.0}) {
      if (power * times >= step * 0.999) return power * times;
    }
    return power * 10;
  }

  const Axis& axis_;
  double low_, high_;
  double step_ = 0;  // between linear ticks
};

// The least and the most of one coordinate of all points.
Ruler ruler_of(const Panel& panel, const Axis& axis, double Point::*coordinate, bool from_zero) {
  double least = from_zero ? 0 : HUGE_VAL, most = from_zero ? 0 : -HUGE_VAL;
  for (const Series& series : panel.series) {
    for (const Point& point : series.points) {
      const double value = point.*coordinate;
      if (!std::isfinite(value) || (axis.scale != Scale::kLinear && value <= 0)) continue;
      least = std::min(least, value);
      most = std::max(most, value);
    }
  }
  if (!axis.names.empty()) {
    least = -0.5;
    most = static_cast<double>(axis.names.size()) - 0.5;
  }
  return {axis, least, most};
}

bool has_bars(const Panel& panel) {
  return std::any_of(panel.series.begin(), panel.series.end(),
                     [](const Series& series) { return series.mark == Mark::kBars; });
}

class PanelDrawing {
 public:
  PanelDrawing(std::ostringstream& out, double left, const Panel& panel,
               const std::vector<std::string>& names)
      : out_(out),
        left_(left),
        panel_(panel),
        names_(names),
        x_(ruler_of(panel, panel.x, &Point::x, false)),
        y_(ruler_of(panel, panel.y, &Point::y, has_bars(panel))) {}

  void draw() {
    text(left_, kTop - 14, escaped(panel_.title), "start", 13);
    const auto rows = y_.ticks(), columns = x_.ticks();
    for (const double tick : rows) {
      out_ << "<line x1=\"" << left_ << "\" y1=\"" << y(tick) << "\" x2=\"" << left_ + kWidth
           << "\" y2=\"" << y(tick) << "\" stroke=\"#dddddd\"/>\n";
      text(left_ - 6, y(tick) + 4, y_.label(tick, tick == rows.back()), "end", 10);
    }
    for (const double tick : columns) {
      text(x(tick), kTop + kHeight + 16, x_.label(tick, tick == columns.back()), "middle", 10);
    }
    text(left_ + kWidth / 2, kTop + kHeight + 34, escaped(panel_.x.label), "middle", 11);
    size_t bars = 0;
    for (const Series& series : panel_.series) {
      if (series.mark == Mark::kBars) {
        draw_bars(series, bars++);
      } else {
        draw_series(series);
      }
    }
  }

 private:
  double x(double value) const { return left_ + kWidth * x_.at(value); }
  double y(double value) const { return kTop + kHeight * (1 - y_.at(value)); }
  const char* colour_of(const Series& series) const {
    const auto place = std::find(names_.begin(), names_.end(), series.name) - names_.begin();
    return kColours[static_cast<size_t>(place) % kColours.size()];
  }

  void draw_series(const Series& series) {
    const char* const colour = colour_of(series);
    std::ostringstream line, dots;
    for (const Point& point : series.points) {
      if (!x_.takes(point.x) || !y_.takes(point.y)) continue;
      line << x(point.x) << ',' << y(point.y) << ' ';
      dots << "<circle r=\"3.5\" fill=\"" << colour << "\" cx=\"" << x(point.x) << "\" cy=\""
           << y(point.y) << "\"/>\n";
    }
    if (series.mark != Mark::kDots) {
      out_ << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << colour << '"'
           << (series.mark == Mark::kDashes ? " stroke-dasharray=\"6 6\"" : "") << " points=\""
           << line.str() << "\"/>\n";
    }
    if (series.mark == Mark::kDots || series.mark == Mark::kLineAndDots) out_ << dots.str();
  }

  // place: among the panel's series of bars, which stand beside each other.
  void draw_bars(const Series& series, size_t place) {
    const auto count = static_cast<double>(
        std::count_if(panel_.series.begin(), panel_.series.end(),
                      [](const Series& other) { return other.mark == Mark::kBars; }));
    const double width = kBarsShare / count;
    for (const Point& point : series.points) {
      if (!x_.takes(point.x) || !y_.takes(point.y)) continue;
      const double from = point.x - kBarsShare / 2 + width * static_cast<double>(place);
      out_ << "<rect x=\"" << x(from) << "\" y=\"" << std::min(y(point.y), y(0)) << "\" width=\""
           << x(from + width) - x(from) << "\" height=\"" << std::abs(y(point.y) - y(0))
           << "\" fill=\"" << colour_of(series) << "\"/>\n";
    }
  }

  void text(double x, double y, const std::string& words, const char* anchor, int size) {
    out_ << "<text x=\"" << x << "\" y=\"" << y << "\" text-anchor=\"" << anchor
         << "\" font-size=\"" << size << "\">" << words << "</text>\n";
  }

  std::ostringstream& out_;
  const double left_;
  const Panel& panel_;
  const std::vector<std::string>& names_;
  const Ruler x_, y_;
};

}  // namespace

std::string svg(const std::vector<Panel>& panels) {
  std::vector<std::string> names;
  for (const Panel& panel : panels) {
    for (const Series& series : panel.series) {
      if (std::find(names.begin(), names.end(), series.name) == names.end()) {
        names.push_back(series.name);
      }
    }
  }
  const double width = kApart * static_cast<double>(panels.size());
  std::ostringstream out;
  out.precision(4);
  out << R"(<svg xmlns="http://www.w3.org/2000/svg" width=")" << width << R"(" height=")" << kAll
      << R"(" font-family="sans-serif">)"
      << "\n<rect width=\"" << width << "\" height=\"" << kAll << "\" fill=\"white\"/>\n";
  double left = kLeft;
  for (const Panel& panel : panels) {
    PanelDrawing(out, left, panel, names).draw();
    left += kApart;
  }
  double at = kLeft;
  for (size_t i = 0; i < names.size(); ++i) {
    out << "<text x=\"" << at << "\" y=\"" << kAll - 15 << "\" font-size=\"13\" fill=\""
        << kColours[i % kColours.size()] << "\">&#9632; " << escaped(names[i]) << "</text>\n";
    at += 30 + 8 * static_cast<double>(names[i].size());
  }
  out << "</svg>\n";
  return out.str();
}

}  // namespace charts
