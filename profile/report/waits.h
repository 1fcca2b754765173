// What a rank's training thread waited for in a step, and what would shorten it, in sentences.
//
// Only waits of the host are seen. What the thread computes meanwhile is no wait, even where another part
// of the step is on its way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profile/report/profile.h"

namespace zeropage::profile {

struct Wait {
  std::string name;  // what kind of wait, as "page", "reduction"
  std::string of;    // the page that was waited for; "": of none
  int64_t wait_ns = 0;
  int64_t times = 0;
  // How many of `times` a page was requested only when it was needed.
  int64_t faults = 0;
  int64_t page_bytes = 0;  // of the whole page; 0: not known
};

// The longest first. Waits for the same thing are one.
std::vector<Wait> waits_of(const RankProfile& rank, const StepProfile& step);
int64_t waited_ns(const std::vector<Wait>& waits);

// "142 ms of 810 ms waiting for page "blocks.7", which was on its way: one page more of prefetch needs 12.0
// MiB", for the longest waits, and how much of the step they are together.
std::vector<std::string> wait_sentences(const RankProfile& rank, const StepProfile& step);

// "142 ms", "0.81 ms".
std::string format_ns(int64_t nanoseconds);

}  // namespace zeropage::profile
