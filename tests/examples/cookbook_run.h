// What the programs of examples/cookbook print, and how near two runs of one must be.
#pragma once

#include <cmath>
#include <csignal>
#include <filesystem>
#include <regex>
#include <string>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/shell.h"

namespace cookbook_run {

using zeropage::testing::Outcome;
using zeropage::testing::shell;

inline std::string program(const std::string& name) {
  return COOKBOOK + name;
}
inline std::string ranks(int count) {
  return ZP " run --grace 60 -n " + std::to_string(count) + " -- ";
}

struct Figures {
  int step = 0;
  double norm = 0, loss = 0;
};

// What lines that begin with a step say, behind a launcher's prefix or without.
inline std::vector<Figures> figures_in(const std::string& output) {
  static const std::regex line("step +([0-9]+)  norm ([0-9.]+)  loss[a-z ]* ([0-9.]+)");
  std::vector<Figures> figures;
  for (std::sregex_iterator at(output.begin(), output.end(), line), end; at != end; ++at) {
    figures.push_back({std::stoi((*at)[1]), std::stod((*at)[2]), std::stod((*at)[3])});
  }
  return figures;
}

struct Bounds {
  double norm = 0;  // of the norm
  double loss = 0;
};

// Sums in another order differ by some 2^-22 of themselves, and 100 steps of these models magnify that to less than 2^-11. Half a digit
// of what is printed comes on top.
inline constexpr Bounds kFp32{.norm = 0x1p-11, .loss = 0x1p-11};
// Each value is rounded by up to 2^-9 of itself, one way here and the other there. A loss moves by no more than its logits do, twice,
// which are below 4. On a gradient's way through four blocks some 2 roundings a block add up.
inline constexpr Bounds kBf16{.norm = 0x1p-6, .loss = 2 * 4 * 0x1p-9};

inline void expect_near(const std::vector<Figures>& got, const std::vector<Figures>& expected,
                        const Bounds& bounds) {
  ASSERT_FALSE(expected.empty());
  ASSERT_EQ(got.size(), expected.size());
  constexpr double kPrinted = 0.5e-4;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].step, expected[i].step);
    EXPECT_NEAR(got[i].norm, expected[i].norm, bounds.norm * expected[i].norm + 2 * kPrinted)
        << "step " << expected[i].step;
    EXPECT_NEAR(got[i].loss, expected[i].loss, bounds.loss + 2 * kPrinted)
        << "step " << expected[i].step;
  }
}

}  // namespace cookbook_run
