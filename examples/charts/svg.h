// Shapes and words of an SVG picture, one after the other. Lengths are in pixels, from the upper left corner.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

namespace charts {

enum class Align : uint8_t { kStart, kMiddle, kEnd };

struct Words {
  double x = 0;
  double y = 0;  // of the base line
  Align align = Align::kStart;
  int size = 11;
  std::string_view color = "black";
};

class Svg {
 public:
  // On white paper, which dark pages keep white.
  Svg(double width, double height);

  void text(const Words& words, std::string_view text);
  void line(double x1, double y1, double x2, double y2, std::string_view color);
  void box(double x, double y, double width, double height, std::string_view color);
  // What there is no function for.
  void add(std::string_view element) { out_ << element << '\n'; }

  std::string picture() const { return out_.str() + "</svg>\n"; }

 private:
  std::ostringstream out_;
};

}  // namespace charts
