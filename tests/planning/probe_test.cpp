// A rank that is slower than the others in one thing is named, with its figure beside the median, and no other is.
#include "zeropage/probe.h"

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "planning/probe_within.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"

namespace zeropage::probe_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

struct Delay {
  int rank = -1;  // -1: no rank
  std::string what = "";
  std::chrono::milliseconds by{0};  // a repetition
};

// The report of each rank. Ranks are threads that share the machine with other tests, so figures of ranks that are alike differ.
std::vector<ProbeReport> reports_of(int ranks, const Delay& delay, ProbeOptions options) {
  options.seconds = 0.02;
  std::vector<ProbeReport> reports(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](comm::World& world) {
    reports[static_cast<size_t>(world.rank())] =
        planning::probe_within(world, options, [&](std::string_view what) {
          if (world.rank() == delay.rank && what == delay.what) {
            std::this_thread::sleep_for(delay.by);
          }
        });
  });
  return reports;
}

std::vector<std::string> names(const ProbeReport& report) {
  std::vector<std::string> all;
  for (const ProbeFigure& of : report.figures) all.push_back(of.what);
  return all;
}

class SlowRankTest : public ::testing::TestWithParam<std::pair<int, Delay>> {};

TEST_P(SlowRankTest, IsNamedWithWhatItIsSlowInAndNoOtherRankIs) {
  const auto& [ranks, delay] = GetParam();
  for (const ProbeReport& report : reports_of(ranks, delay, {.slow_below = 0.25})) {
    std::vector<SlowRank> slow;  // in this: other tests may slow a rank in others
    for (const SlowRank& of : report.slow) {
      if (of.what == delay.what) slow.push_back(of);
    }
    ASSERT_THAT(slow, ElementsAre(Field(&SlowRank::rank, delay.rank))) << report.to_string();
    EXPECT_LT(slow[0].figure, slow[0].median / 4);
    EXPECT_THAT(report.to_string(),
                AllOf(HasSubstr(c10::str("rank ", delay.rank, " is slow: ", delay.what, " ")),
                      HasSubstr(c10::str(", the median of ", ranks, " ranks is "))));
  }
}

using std::chrono::milliseconds;
INSTANTIATE_TEST_SUITE_P(
    Figures, SlowRankTest,
    ::testing::Values(
        std::pair(4, Delay{2, "matrix product", milliseconds(300)}),
        std::pair(4, Delay{3, "memory copy", milliseconds(800)}),
        // A ring of each kind: the pairs that have a slow rank are slow for their other rank, too.
        std::pair(3, Delay{1, "link", milliseconds(100)}),
        std::pair(4, Delay{0, "link", milliseconds(100)}),
        std::pair(5, Delay{4, "link", milliseconds(100)})));

TEST(ProbeTest, NamesNobodyWhereRanksAreAlike) {
  for (const int ranks : {1, 2, 3}) {
    for (const ProbeReport& report : reports_of(ranks, {}, {.slow_below = 0.01})) {
      EXPECT_THAT(report.slow, IsEmpty()) << report.to_string();
      EXPECT_THAT(report.to_string(), Not(HasSubstr("slow")));
      EXPECT_THAT(report.figures, SizeIs(ranks == 1 ? 2 : 3));
      for (const ProbeFigure& of : report.figures) {
        EXPECT_THAT(of.by_rank, SizeIs(ranks));
        EXPECT_THAT(of.by_rank, Each(Gt(0))) << of.what;
      }
    }
  }
}

TEST(ProbeTest, MeasuresADiskWhereOneIsGiven) {
  const DiskFolder folder;
  for (const ProbeReport& report : reports_of(2, {}, {.disk_directory = folder.path()})) {
    EXPECT_THAT(names(report),
                ElementsAre("matrix product", "memory copy", "link", "disk write", "disk read"));
    EXPECT_GT(report.figures.back().median, 0);
  }
}

TEST(ProbeTest, RefusesOptionsOutOfBounds) {
  run_ranks(1, [](comm::World& world) {
    EXPECT_THAT(error_of([&] { probe(world, {.slow_below = 1}); }),
                HasSubstr("ProbeOptions::slow_below: expected a part of the median, above 0 and "
                          "below 1, got 1"));
    EXPECT_THAT(error_of([&] { probe(world, {.seconds = 0}); }),
                HasSubstr("ProbeOptions::seconds: expected more than 0"));
  });
}

}  // namespace
}  // namespace zeropage::probe_test
