#include "examples/charts/svg.h"

#include <array>

namespace charts {
namespace {

constexpr std::string_view word_for(Align align) {
  constexpr std::array<std::string_view, 3> kWords = {"start", "middle", "end"};
  return kWords[static_cast<size_t>(align)];
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char letter : text) {
    if (letter == '&') {
      out += "&amp;";
    } else if (letter == '<') {
      out += "&lt;";
    } else {
      out += letter;
    }
  }
  return out;
}

}  // namespace

Svg::Svg(double width, double height) {
  out_.precision(4);
  out_ << R"(<svg xmlns="http://www.w3.org/2000/svg" width=")" << width << "\" height=\"" << height
       << "\" font-family=\"sans-serif\">\n<rect width=\"" << width << "\" height=\"" << height
       << "\" fill=\"white\"/>\n";
}

void Svg::text(const Words& words, std::string_view text) {
  out_ << "<text x=\"" << words.x << "\" y=\"" << words.y << "\" text-anchor=\""
       << word_for(words.align) << "\" font-size=\"" << words.size << '"';
  if (words.color != "black") out_ << " fill=\"" << words.color << '"';
  out_ << '>' << escaped(text) << "</text>\n";
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view color) {
  out_ << "<line x1=\"" << x1 << "\" y1=\"" << y1 << "\" x2=\"" << x2 << "\" y2=\"" << y2
       << "\" stroke=\"" << color << "\"/>\n";
}

void Svg::box(double x, double y, double width, double height, std::string_view color) {
  out_ << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << width << "\" height=\"" << height
       << "\" fill=\"" << color << "\"/>\n";
}

}  // namespace charts
