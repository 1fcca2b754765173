#include "tools/schedule_picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <string_view>

namespace zeropage::tools {
namespace {

using namespace parallel;

constexpr double kLeastChart = 860;
constexpr double kWidestChart = 8000;
constexpr double kLeft = 64;   // of the chart, beside the ranks' names
constexpr double kRight = 96;  // for what a rank holds
constexpr double kTop = 64;
constexpr double kRowHeight = 30;
constexpr double kRowGap = 6;
constexpr double kLetter = 7;  // the width that one takes

constexpr std::array kKinds = {ActionKind::kForward, ActionKind::kBackward,
                               ActionKind::kInputGradient, ActionKind::kWeightGradient};

constexpr char letter_of(ActionKind kind) {
  return "FBIW"[static_cast<size_t>(kind)];
}

// Colours differ in lightness too, and boxes carry letters. Later chunks of a rank have a thicker, dashed frame.
constexpr std::string_view kStyle = R"(<style>
text{font:12px system-ui,-apple-system,'Segoe UI',Arial,sans-serif;fill:#1f2328}
.title{font-size:14px;font-weight:600}.muted{fill:#57606a}.paper{fill:#ffffff}.line{stroke:#d0d7de}
.F{fill:#bcd9f5}.B{fill:#8fcf9d}.I{fill:#f7cf9b}.W{fill:#d9c3ee}.box{stroke:#ffffff}.later{stroke:#1f2328;stroke-dasharray:3 2}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.muted{fill:#9198a1}.paper{fill:#0d1117}.line{stroke:#3d444d}
.F{fill:#1f4f82}.B{fill:#1f6b35}.I{fill:#86530f}.W{fill:#5b3b85}.box{stroke:#0d1117}.later{stroke:#e6edf3}
}
</style>
)";

// Rounded to a tenth, so that pictures do not depend on the last bits of a time.
std::string tenth(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.1f", value);
  std::string text = digits;
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

// Between marks of the axis: 1, 2 or 5 times a power of ten, for 6 to 15 marks.
double tick_seconds(double whole) {
  const double power = std::pow(10, std::floor(std::log10(whole / 6)));
  for (const double factor : {5.0, 2.0}) {
    if (whole / (factor * power) >= 6) return factor * power;
  }
  return power;
}

struct Unit {
  std::string_view name;
  double per_second;
};

Unit unit_of(double whole) {
  if (whole >= 1) return {"s", 1};
  return whole >= 1e-3 ? Unit{"ms", 1e3} : Unit{"us", 1e6};
}

std::string short_number(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.4g", value);
  return digits;
}

class Drawing {
 public:
  explicit Drawing(const SchedulePicture& picture)
      : picture_(picture),
        whole_s_(std::max(makespan_s(picture.timeline), 1e-9)),
        chart_width_(width_for(picture, whole_s_)) {}

  std::string text() {
    const double width = kLeft + chart_width_ + kRight;
    const double bottom = row_top(picture_.timeline.size());
    out_ << R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 )" << tenth(width) << ' '
         << tenth(bottom + 44) << "\" width=\"" << tenth(width) << "\" height=\""
         << tenth(bottom + 44) << "\" role=\"img\">\n<title>" << picture_.title << "</title>\n"
         << kStyle << "<rect width=\"100%\" height=\"100%\" class=\"paper\"/>\n";
    words(kLeft, 22, picture_.title, "title");
    draw_legend();
    draw_axis(bottom);
    words(kLeft + chart_width_ + 10, kTop - 6, "holds at most", "muted");
    for (size_t rank = 0; rank < picture_.timeline.size(); ++rank) draw_rank(rank);
    out_ << "</svg>\n";
    return out_.str();
  }

 private:
  // Three of four boxes have room for their numbers.
  static double width_for(const SchedulePicture& picture, double whole_s) {
    std::vector<double> seconds;
    int last = 0;
    for (const auto& actions : picture.timeline) {
      for (const TimedAction& timed : actions) {
        seconds.push_back(timed.end_s - timed.begin_s);
        last = std::max(last, timed.action.micro_batch);
      }
    }
    if (seconds.empty()) return kLeastChart;
    const auto quarter = seconds.begin() + static_cast<int64_t>(seconds.size() / 4);
    std::nth_element(seconds.begin(), quarter, seconds.end());
    const size_t letters = std::to_string(last).size() + (picture.chunks > 1 ? 2 : 0);
    const double box = kLetter * static_cast<double>(letters) + 5;
    if (*quarter <= 0) return kWidestChart;
    return std::clamp(box * whole_s / *quarter, kLeastChart, kWidestChart);
  }

  double x(double seconds) const { return kLeft + chart_width_ * seconds / whole_s_; }
  static double row_top(size_t rank) {
    return kTop + static_cast<double>(rank) * (kRowHeight + kRowGap);
  }

  void words(double x, double y, const std::string& text, std::string_view style,
             std::string_view anchor = "start") {
    out_ << "<text x=\"" << tenth(x) << "\" y=\"" << tenth(y) << "\" class=\"" << style << '"';
    if (anchor != "start") out_ << " text-anchor=\"" << anchor << '"';
    out_ << '>' << text << "</text>\n";
  }

  bool has(ActionKind kind) const {
    for (const auto& actions : picture_.timeline) {
      for (const TimedAction& timed : actions) {
        if (timed.action.kind == kind) return true;
      }
    }
    return false;
  }

  void draw_legend() {
    double at = kLeft;
    for (const ActionKind kind : kKinds) {
      if (!has(kind)) continue;
      const std::string label = std::string(1, letter_of(kind)) + " " + std::string(name(kind));
      out_ << "<rect x=\"" << tenth(at)
           << "\" y=\"34\" width=\"14\" height=\"14\" rx=\"2\" class=\"" << letter_of(kind)
           << "\"/>\n";
      words(at + 20, 45, label, "muted");
      at += 40 + kLetter * static_cast<double>(label.size());
    }
    words(at, 45,
          picture_.chunks > 1 ? "number: micro-batch.chunk; dashed: chunks after the first"
                              : "number: micro-batch",
          "muted");
  }

  void draw_axis(double bottom) {
    const Unit unit = unit_of(whole_s_);
    const double step = tick_seconds(whole_s_);
    const auto last = static_cast<int>(std::floor(whole_s_ / step + 1e-9));
    for (int tick = 0; tick <= last; ++tick) {
      const double at = x(tick * step);
      out_ << "<path class=\"line\" d=\"M" << tenth(at) << ',' << tenth(kTop - 2) << " V"
           << tenth(bottom) << "\"/>\n";
      words(at, bottom + 14, short_number(tick * step * unit.per_second), "muted", "middle");
    }
    words(kLeft + chart_width_ / 2, bottom + 34, "time, " + std::string(unit.name), "muted",
          "middle");
  }

  void draw_rank(size_t rank) {
    const double top = row_top(rank);
    const double base = top + kRowHeight / 2 + 4;
    words(kLeft - 10, base, "rank " + std::to_string(rank), "", "end");
    for (const TimedAction& timed : picture_.timeline[rank]) draw_action(timed, top, base);
    words(kLeft + chart_width_ + 10, base, short_number(picture_.peak_activations[rank]), "muted");
  }

  void draw_action(const TimedAction& timed, double top, double base) {
    const Action& action = timed.action;
    const double left = x(timed.begin_s);
    const double width = x(timed.end_s) - left;
    out_ << "<rect x=\"" << tenth(left) << "\" y=\"" << tenth(top) << "\" width=\"" << tenth(width)
         << "\" height=\"" << tenth(kRowHeight) << "\" rx=\"2\" class=\"box "
         << letter_of(action.kind) << (action.chunk > 0 ? " later" : "") << "\"><title>"
         << describe(action, picture_.chunks) << "</title></rect>\n";
    const std::string label = label_in(action, width);
    if (!label.empty()) words(left + width / 2, base, label, "", "middle");
  }

  // The longest of its texts for which there is room; "" if there is none.
  std::string label_in(const Action& action, double width) const {
    const std::string number = std::to_string(action.micro_batch);
    const std::string whole =
        picture_.chunks > 1 ? number + "." + std::to_string(action.chunk) : number;
    for (const std::string& label : {letter_of(action.kind) + whole, whole, number}) {
      if (kLetter * static_cast<double>(label.size()) + 4 <= width) return label;
    }
    return "";
  }

  const SchedulePicture& picture_;
  double whole_s_;
  double chart_width_;  // points, without what is beside it
  std::ostringstream out_;
};

}  // namespace

std::string svg(const SchedulePicture& picture) {
  return Drawing(picture).text();
}

}  // namespace zeropage::tools
