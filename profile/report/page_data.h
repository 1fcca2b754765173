// What the page's script draws, as JSON: moments, lanes, spans, tables and sentences.
#pragma once

#include <cstddef>
#include <string>

#include "zeropage/profile.h"

namespace zeropage::profile {

// How much of each step is drawn.
struct PageDetail {
  size_t moments = 800;
  size_t spans = 600;
  size_t lanes = 400;
  size_t ranks = 16;
  size_t steps = 32;

  // Less of everything that there is most of. False: there is no less.
  bool halve();
};

std::string page_data(const Profile& profile, const Profile* other, const PageDetail& detail);

}  // namespace zeropage::profile
