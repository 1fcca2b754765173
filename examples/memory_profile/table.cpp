#include "memory_profile/table.h"

#include <cstdio>

#include <zeropage/profile.h>

namespace memory_profile {
namespace {

std::string cell(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%10.2f", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

}  // namespace

std::string table(const zeropage::profile::Profile& profile) {
  using zeropage::profile::StepProfile;
  // What nobody has any of is no column.
  const std::vector<size_t> kinds = zeropage::profile::kinds_in_use(profile);
  std::string text = padded("MiB at the peak of rank 0", 32) + "     total";
  for (const size_t kind : kinds) text += "  " + profile.kinds[kind];
  text += "      step    waits\n";
  for (const StepProfile& step : profile.ranks.front().steps) {
    const auto peak = zeropage::profile::peak_of(step, profile.device);
    text += padded(step.label, 32) + cell(peak.total);
    for (const size_t kind : kinds) {
      text += padded("", profile.kinds[kind].size() + 2 -
                             std::min<size_t>(10, profile.kinds[kind].size() + 2)) +
              cell(peak.by_kind[kind]);
    }
    const auto waits = zeropage::profile::waits_of(profile.ranks.front(), step);
    text += "  " + padded(zeropage::profile::format_ns(step.duration_ns), 8) + "  " +
            zeropage::profile::format_ns(zeropage::profile::waited_ns(waits)) + "\n";
  }
  return text;
}

}  // namespace memory_profile
