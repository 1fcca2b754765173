// A step of a pipeline as an SVG picture: a row a rank, a box an action, and a time axis. It is readable on light and dark pages.
#pragma once

#include <string>
#include <vector>

#include "zeropage/schedule.h"

namespace zeropage::tools {

struct SchedulePicture {
  std::string title;
  int chunks = 1;                        // of each rank
  std::vector<double> peak_activations;  // [ranks], in micro-batches
  parallel::Timeline timeline;
};

// Its width is what the numbers in the boxes need, up to 8000 points; the same picture gives the same bytes.
std::string svg(const SchedulePicture& picture);

}  // namespace zeropage::tools
