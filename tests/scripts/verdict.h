// Whether this library does with a script what LibTorch does, or what it does itself under plainer settings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/scripts/script.h"
#include "tests/scripts/side.h"

namespace zeropage::scripts {

// What some scripts are to be told, and the page that tells users what to do. Others must not be told so.
struct Refusal {
  const char* words;
  const char* page;
  bool (*is_due)(const Script& script);
};
const std::vector<Refusal>& refusals();

struct Verdict {
  enum class Is : uint8_t {
    kAlike,
    kRefused,    // as it had to be
    kDiverged,   // the values beside are too large or no numbers, so nothing is compared
    kDifferent,  // values
    kError,      // one that nobody knows
  };
  Is is = Is::kAlike;
  std::string words;  // what differs, the refusal or the error
  int steps = 0;      // that were compared

  bool is_fault() const { return is == Is::kDifferent || is == Is::kError; }
};

Verdict verdict_of(const Script& script);
// Compares what the two sides saw.
Verdict compared(const Script& script, const Observations& expected, const Observations& got);

}  // namespace zeropage::scripts
