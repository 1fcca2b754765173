// What reports say of a profile whose figures are known.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "profile/report/chrome_trace.h"
#include "profile/report/growth.h"
#include "profile/report/html_page.h"
#include "profile/report/page_data.h"
#include "profile/report/page_lanes.h"
#include "profile/report/profile_file.h"
#include "profile/report/terminal.h"
#include "tests/harness/errors.h"
#include "zeropage/profile.h"

namespace zeropage::profile::report_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using zeropage::testing::error_of;

constexpr int64_t kMs = 1'000'000;
constexpr uint8_t kParameter = 0, kActivation = 1;
enum Name : NameIndex {
  kNone,
  kMm,
  kFetch,
  kBlock,
  kOfParameter,
  kPage,
  kGather,
  kForward,
  kOfGradient
};

// A step of 100 ms of one rank, with a page of 4096 bytes.
class Building {
 public:
  explicit Building(int64_t number = 3) {
    step_.step = number;
    step_.duration_ns = 100 * kMs;
    step_.before = {{1000, 0}, {0, 0}};
  }

  void allocate(int64_t at_ms, uint8_t kind, int64_t bytes, NameIndex owner,
                NameIndex page = kNone) {
    step_.changes.push_back({.time_ns = at_ms * kMs,
                             .bytes = bytes,
                             .kind = kind,
                             .kind_before = kind,
                             .phase = Change::Phase::kForward,
                             .owner = owner,
                             .page = page,
                             .block = ++block_});
  }
  // The block that was allocated last but `back`.
  void free(int64_t at_ms, uint8_t kind, int64_t bytes, uint64_t back = 0) {
    step_.changes.push_back({.time_ns = at_ms * kMs,
                             .bytes = -bytes,
                             .kind = kind,
                             .kind_before = kind,
                             .block = block_ - back});
  }
  void page(int64_t at_ms, PageRecord::What what, NameIndex pages = kOfParameter) {
    step_.pages.push_back(
        {.time_ns = at_ms * kMs, .what = what, .page = kBlock, .pages = pages, .bytes = 4096});
  }
  void span(SpanRecord::What what, int64_t begin_ms, int64_t end_ms, NameIndex name, NameIndex of) {
    step_.spans.push_back({.begin_ns = begin_ms * kMs,
                           .end_ns = end_ms * kMs,
                           .what = what,
                           .name = name,
                           .of = of,
                           .bytes = 4096,
                           .on_training_thread = true});
  }
  void holds(int64_t bytes) {
    step_.held.push_back({.account = 0,
                          .kind = kActivation,
                          .owner = kMm,
                          .page = kBlock,
                          .bytes = bytes,
                          .blocks = 1});
  }

  StepProfile step() const { return step_; }

 private:
  StepProfile step_;
  uint64_t block_ = 0;
};

Profile profile_of(std::vector<StepProfile> steps, const std::string& title = "A run") {
  Profile profile{.title = title,
                  .facts = {{"stage", "3"}},
                  .kinds = {"parameter", "activation"},
                  .accounts = {"host", "nvme tier"},
                  .device = 0,
                  .ranks = {}};
  profile.ranks.push_back({.rank = 0,
                           .names = {"", "aten::mm", "page fetch", "blocks.7", "parameter", "page",
                                     "all_gather", "forward", "gradient"},
                           .formula = {1000, 0},
                           .steps = std::move(steps)});
  return profile;
}

// The peak, 1000 + 500 + 4096 + 300 bytes, is at 30 ms. more_bytes: are held besides, from 5 ms on.
Building usual(int64_t more_bytes = 0) {
  Building step;
  if (more_bytes > 0) step.allocate(5, kActivation, more_bytes, kMm, kBlock);
  step.allocate(10, kActivation, 500, kMm);
  step.page(20, PageRecord::What::kFetching);
  step.allocate(20, kParameter, 4096, kFetch, kBlock);
  step.page(25, PageRecord::What::kResident);
  step.allocate(30, kActivation, 300, kMm);
  step.free(40, kActivation, 300);
  step.free(50, kParameter, 4096, 1);
  step.page(50, PageRecord::What::kEvicted);
  step.span(SpanRecord::What::kRange, 0, 60, kForward, kNone);
  step.span(SpanRecord::What::kCollective, 20, 25, kGather, kBlock);
  return step;
}

// ---- timelines ----

TEST(TimelineOfAProfileTest, FindsThePeakAndWhoHoldsIt) {
  const Profile profile = profile_of({usual().step()});
  const RankProfile& rank = profile.ranks[0];
  const Moment peak = peak_of(rank.steps[0], 0);
  EXPECT_EQ(peak.total, 5896);
  EXPECT_THAT(peak.by_kind, ElementsAre(5096, 800));
  EXPECT_EQ(peak.time_ns, 30 * kMs);
  const std::vector<Holder> holders = holders_at_peak(rank, rank.steps[0], 0);
  ASSERT_EQ(holders.size(), 2U);
  EXPECT_EQ(holders[0].bytes, 4096);
  EXPECT_EQ(holders[0].owner, "page fetch");
  EXPECT_EQ(holders[0].page, "blocks.7");
  EXPECT_EQ(holders[1].bytes, 800);
  EXPECT_EQ(holders[1].blocks, 2);
}

TEST(TimelineOfAProfileTest, SamplesKeepThePeakHoweverFewTheyAre) {
  const StepProfile step = usual().step();
  for (const size_t most : {1U, 2U, 3U, 100U}) {
    const std::vector<Moment> moments = sampled(step, 0, most);
    EXPECT_LE(moments.size(), most);
    int64_t highest = 0;
    for (const Moment& moment : moments) highest = std::max(highest, moment.total);
    EXPECT_EQ(highest, 5896) << most;
  }
}

// ---- lanes ----

TEST(PageLanesTest, APageIsShardedFetchingResidentAndSharded) {
  Building step = usual();
  step.page(70, PageRecord::What::kReducing, kOfGradient);
  step.page(80, PageRecord::What::kReduced, kOfGradient);
  const Profile profile = profile_of({step.step()});
  const auto lanes = page_lanes(profile.ranks[0], profile.ranks[0].steps[0]);
  ASSERT_EQ(lanes.size(), 1U);
  EXPECT_EQ(lanes[0].bytes, 4096);
  std::vector<std::string> found;
  for (const PageStretch& stretch : lanes[0].stretches) {
    found.push_back(std::string(name(stretch.state)) + " " +
                    std::to_string(stretch.begin_ns / kMs) + "-" +
                    std::to_string(stretch.end_ns / kMs));
  }
  EXPECT_THAT(found, ElementsAre("sharded 0-20", "fetching 20-25", "resident 25-50",
                                 "sharded 50-100", "reducing 70-80"));
}

TEST(PageLanesTest, APageThatIsNeverFetchedIsWholeAtAllTimes) {
  Building step;
  step.page(70, PageRecord::What::kReducing, kOfGradient);
  step.page(80, PageRecord::What::kReduced, kOfGradient);
  const Profile profile = profile_of({step.step()});
  const auto lanes = page_lanes(profile.ranks[0], profile.ranks[0].steps[0]);
  ASSERT_EQ(lanes.size(), 1U);
  ASSERT_EQ(lanes[0].stretches.size(), 2U);
  EXPECT_EQ(lanes[0].stretches[0].state, PageState::kResident);
  EXPECT_EQ(lanes[0].stretches[0].end_ns, 100 * kMs);
  EXPECT_EQ(lanes[0].stretches[1].state, PageState::kReducing);
}

// ---- waits ----

TEST(WaitsTest, SayHowLongAPageWasWaitedForAndWhatMorePrefetchNeeds) {
  Building step = usual();
  step.span(SpanRecord::What::kWait, 23, 65, kPage, kBlock);
  const Profile profile = profile_of({step.step()});
  const auto sentences = wait_sentences(profile.ranks[0], profile.ranks[0].steps[0]);
  EXPECT_THAT(sentences,
              ElementsAre("Step 3 of rank 0: its training thread waited for 42 ms of 100 ms, 42 %",
                          "42 ms of 100 ms waiting for page \"blocks.7\": it was on its way: one "
                          "page more of prefetch (options.prefetch_bytes) needs 4.0 KiB"));
}

TEST(WaitsTest, APageThatNobodyAskedForBeforeIsAFault) {
  Building step = usual();
  step.span(SpanRecord::What::kWait, 20, 25, kPage, kBlock);
  const Profile profile = profile_of({step.step()});
  EXPECT_EQ(waits_of(profile.ranks[0], profile.ranks[0].steps[0])[0].faults, 1);
  EXPECT_THAT(wait_sentences(profile.ranks[0], profile.ranks[0].steps[0])[1],
              HasSubstr("nothing had asked for it before an operator needed it"));
}

TEST(WaitsTest, AWaitWithinAWaitCountsOnce) {
  Building step = usual();
  step.span(SpanRecord::What::kWait, 20, 30, kPage, kBlock);
  step.span(SpanRecord::What::kWait, 22, 28, kGather, kBlock);
  const Profile profile = profile_of({step.step()});
  EXPECT_EQ(waited_ns(waits_of(profile.ranks[0], profile.ranks[0].steps[0])), 10 * kMs);
}

TEST(WaitsTest, AStepWithoutThemSaysSo) {
  const Profile profile = profile_of({usual().step()});
  EXPECT_THAT(wait_sentences(profile.ranks[0], profile.ranks[0].steps[0]),
              ElementsAre(HasSubstr("in which its training thread never waited")));
}

// ---- growth ----

Profile growing(std::vector<int64_t> bytes) {
  std::vector<StepProfile> steps;
  for (const int64_t held : bytes) {
    Building step(static_cast<int64_t>(steps.size()));
    if (held > 0) step.holds(held);
    steps.push_back(step.step());
  }
  return profile_of(std::move(steps));
}

TEST(GrowthOfAProfileTest, IsWhatEveryStepAddsTo) {
  EXPECT_EQ(growth_of(growing({100, 200, 300})).size(), 1U);
  EXPECT_EQ(growth_of(growing({0, 100, 200})).size(), 1U);
  EXPECT_TRUE(growth_of(growing({100, 200})).empty()) << "two steps tell nothing";
  EXPECT_TRUE(growth_of(growing({100, 200, 200})).empty());
  EXPECT_TRUE(growth_of(growing({300, 200, 100})).empty());
  EXPECT_TRUE(growth_of(growing({100, 200, 150, 300})).empty());
}

// ---- two runs ----

TEST(DifferenceTest, NamesWhoHoldsMoreByKindOwnerAndPage) {
  const Profile here = profile_of({usual().step()}), there = profile_of({usual(700).step()});
  EXPECT_TRUE(difference(here, here).empty());
  const auto rows = difference(here, there);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].kind, "activation");
  EXPECT_EQ(rows[0].owner, "aten::mm");
  EXPECT_EQ(rows[0].page, "blocks.7");
  EXPECT_EQ(rows[0].bytes, 0);
  EXPECT_EQ(rows[0].other_bytes, 700);
}

// ---- the terminal ----

TEST(TerminalReportTest, SparklinesReachFromNothingToTheMost) {
  EXPECT_EQ(sparkline({0, 1, 50, 100}, 100), "▁▁▄█");
  EXPECT_EQ(sparkline({0, 0}, 0), "▁▁");
}

TEST(TerminalReportTest, HasThePeakTheTableTheHoldersAndTheOtherRun) {
  const Profile here = profile_of({usual().step()});
  const Profile there = profile_of({usual(1024).step()}, "Another run");
  const std::string text = terminal_report(here, &there);
  EXPECT_THAT(text, HasSubstr("the peak, 5.8 KiB, is at 30 ms, in its forward"));
  EXPECT_THAT(text, HasSubstr("parameter            page fetch of page \"blocks.7\", 1 block"));
  EXPECT_THAT(text, HasSubstr("+1.0 KiB"));
  EXPECT_THAT(text, HasSubstr("Against \"Another run\""));
  EXPECT_THAT(terminal_report(profile_of({})), HasSubstr("No step was recorded"));
}

// ---- traces ----

TEST(ChromeTraceTest, HasSlicesOfPagesAndSpansAndCountersOfBytes) {
  const auto trace = nlohmann::json::parse(chrome_trace(profile_of({usual().step()})));
  std::vector<std::string> slices;
  int64_t most = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") {
      slices.push_back(event["name"].get<std::string>() + " " +
                       std::to_string(event["ts"].get<int64_t>()) + "+" +
                       std::to_string(event["dur"].get<int64_t>()));
    }
    if (event["ph"] != "C") continue;
    int64_t total = 0;
    for (const auto& bytes : event["args"]) total += bytes.get<int64_t>();
    most = std::max(most, total);
  }
  EXPECT_EQ(most, 5896);
  for (const char* expected : {"step 3 0+100000", "forward 0+60000", "all_gather 20000+5000",
                               "fetching 20000+5000", "resident 25000+25000"}) {
    EXPECT_THAT(slices, Contains(expected));
  }
}

// ---- the page ----

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class HtmlPageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("zeropage-page-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // What Chromium has made of the page, as HTML; "" where there is no Chromium.
  std::string drawn(const std::string& page, const std::string& flags = "") const {
    const std::filesystem::path file = folder_ / "page.html", dom = folder_ / "dom.html";
    write_text(file, page);
    // A proxy that is not there: what the page asked of a network would fail, and be seen below.
    const std::string command =
        "timeout 60 chromium --headless --no-sandbox --disable-gpu --user-data-dir=" +
        (folder_ / "user").string() + " --proxy-server=127.0.0.1:9 --virtual-time-budget=4000 " +
        flags + " --dump-dom file://" + file.string() + " > " + dom.string() + " 2> " +
        (folder_ / "log").string();
    EXPECT_EQ(std::system(command.c_str()), 0) << text_of(folder_ / "log");
    return text_of(dom);
  }
  static bool has_chromium() { return std::system("command -v chromium > /dev/null 2>&1") == 0; }

  std::filesystem::path folder_;
};

TEST_F(HtmlPageTest, NeedsNothingButItself) {
  const Profile there = profile_of({usual(1024).step()}, "Another run");
  const std::string page = html_page(profile_of({usual().step()}), &there);
  EXPECT_THAT(page, Not(HasSubstr("http://")));
  EXPECT_THAT(page, Not(HasSubstr("https://")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("url(")));
  EXPECT_THAT(page, Not(HasSubstr("@import")));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  for (const char* place : {"@TITLE@", "@STYLE@", "@SCRIPT@", "@DATA@"}) {
    EXPECT_THAT(page, Not(HasSubstr(place)));
  }
}

TEST_F(HtmlPageTest, TextsOfTheRunAreNoMarkup) {
  const std::string page =
      html_page(profile_of({usual().step()}, "</title></script><script>alert(1)</script>"));
  EXPECT_THAT(page, Not(HasSubstr("<script>alert(1)")));
  // Nor a place of the page.
  EXPECT_THAT(html_page(profile_of({usual().step()}, "@STYLE@ and @DATA@")),
              HasSubstr("<title>@STYLE@ and @DATA@ · memory profile</title>"));
}

// 8 ranks of 4 steps with 20,000 changes each.
TEST_F(HtmlPageTest, StaysBelowTwoMegabytesWhateverWasRecorded) {
  Building step;
  for (int64_t change = 0; change < 10'000; ++change) {
    step.allocate(change / 101, kActivation, 1000 + 7919 * change % 100'003, kMm);
    if (change % 3 != 0) step.free(change / 101, kActivation, 1000 + 7919 * change % 100'003);
    if (change % 4 == 0) {
      step.span(SpanRecord::What::kCollective, change / 101, change / 101 + 1, kGather, kBlock);
    }
  }
  Profile profile = profile_of({step.step(), step.step(), step.step(), step.step()});
  for (int rank = 1; rank < 8; ++rank) {
    profile.ranks.push_back(profile.ranks.front());
    profile.ranks.back().rank = rank;
  }
  const std::string page = html_page(profile, &profile);
  EXPECT_LT(page.size(), kMostPageBytes);
  EXPECT_GT(page.size(), kMostPageBytes / 8);
}

// The first colour of that name in the page from `at` on, as its relative luminance (WCAG 2.2).
double luminance(const std::string& page, size_t at, const std::string& name) {
  const size_t found = page.find("--" + name + ": #", at);
  const auto colour = std::stoul(page.substr(found + name.size() + 5, 6), nullptr, 16);
  const auto linear = [&](int shift) {
    const double part = static_cast<double>((colour >> shift) & 0xff) / 255;
    return part <= 0.04045 ? part / 12.92 : std::pow((part + 0.055) / 1.055, 2.4);
  };
  return 0.2126 * linear(16) + 0.7152 * linear(8) + 0.0722 * linear(0);
}

// By their lightness, which everybody sees.
TEST_F(HtmlPageTest, ReducingAndWaitingHaveColoursThatAreToldApart) {
  const std::string page = html_page(profile_of({usual().step()}));
  for (const size_t at : {page.find(":root"), page.find("prefers-color-scheme: dark")}) {
    ASSERT_NE(at, std::string::npos);
    const double reducing = luminance(page, at, "reducing"), wait = luminance(page, at, "wait");
    EXPECT_GE((std::max(reducing, wait) + 0.05) / (std::min(reducing, wait) + 0.05), 2);
  }
}

Profile profile_of_81_steps() {
  std::vector<StepProfile> steps;
  for (int64_t step = 119; step < 200; ++step) {
    steps.push_back(usual().step());
    steps.back().step = step;
  }
  return profile_of(steps);
}

TEST_F(HtmlPageTest, KnowsHowMuchIsLeftOut) {
  const auto run =
      nlohmann::json::parse(page_data(profile_of_81_steps(), nullptr, {.steps = 10})).at("run");
  EXPECT_EQ(run.at("step_count"), 81);
  EXPECT_EQ(run.at("by_step").size(), 64U);
  const auto& rank = run.at("ranks").at(0);
  EXPECT_EQ(rank.at("recorded"), 81);
  EXPECT_EQ(rank.at("first"), 119);
  EXPECT_EQ(rank.at("steps").size(), 10U);
  EXPECT_EQ(rank.at("steps").at(0).at("all_lanes"), 1);
  EXPECT_EQ(rank.at("steps").at(0).at("accounts").at(0).at("peak").at("all_holders"), 2);
}

TEST_F(HtmlPageTest, ChromiumSaysWhatIsLeftOut) {
  if (!has_chromium()) GTEST_SKIP() << "there is no chromium on PATH; apt-get install chromium";
  const std::string page = drawn(html_page(profile_of_81_steps()));
  EXPECT_THAT(
      page,
      HasSubstr("Of 81 recorded steps of rank 0 (119 to 199) it draws the last 32, from 168 on."));
  EXPECT_THAT(page, HasSubstr("The first 64 of 81 recorded steps"));
}

TEST_F(HtmlPageTest, ChromiumDrawsItWithTablesLanesAndAMomentForTheKeyboard) {
  if (!has_chromium()) GTEST_SKIP() << "there is no chromium on PATH; apt-get install chromium";
  Building step = usual();
  step.span(SpanRecord::What::kWait, 23, 65, kPage, kBlock);
  const Profile there = profile_of({usual(1024).step()}, "Another run");
  const std::string page = drawn(html_page(profile_of({step.step()}), &there));
  EXPECT_THAT(page, HasSubstr("data-drawn=\"yes\"")) << "the script ended before its end";
  EXPECT_THAT(page, HasSubstr("The peak, 5.8 KiB, is at 30 ms in its forward (dashed line)"));
  EXPECT_THAT(page, HasSubstr("aria-valuetext=\"30 ms of 100 ms, forward: 5.8 KiB, the peak\""));
  // The slider is one of time, in microseconds.
  EXPECT_THAT(page, HasSubstr("max=\"100000\""));
  // The later one is above.
  EXPECT_LT(page.find("id=\"area-cursor\""), page.find("class=\"peak-line\""));
  EXPECT_THAT(page, HasSubstr("blocks.7"));
  EXPECT_THAT(page, HasSubstr("42 ms of 100 ms waiting for page \"blocks.7\""));
  EXPECT_THAT(page, HasSubstr("“Another run”"));
  EXPECT_THAT(page, HasSubstr("+1.0 KiB"));
}

TEST_F(HtmlPageTest, ChromiumSaysWhereNothingWasRecorded) {
  if (!has_chromium()) GTEST_SKIP() << "there is no chromium on PATH; apt-get install chromium";
  EXPECT_THAT(drawn(html_page(profile_of({}))), HasSubstr("no step was recorded"));
}

// ---- files ----

TEST(ProfileFilesTest, GoByTheEndsOfTheirNames) {
  EXPECT_EQ(ProfileFiles::by_name("a/b.html").page, "a/b.html");
  EXPECT_EQ(ProfileFiles::by_name("b.trace.json").trace, "b.trace.json");
  EXPECT_EQ(ProfileFiles::by_name("b.json").profile, "b.json");
  EXPECT_THAT(error_of([] { ProfileFiles::by_name("b.txt"); }),
              HasSubstr("\"b.txt\": expected a name that ends in .html for the page"));
  EXPECT_EQ(check_names({.page = "a.html", .profile = "", .trace = "b.json"}), "");
  EXPECT_THAT(check_names({.page = "a.json", .profile = "", .trace = ""}),
              HasSubstr("ends in .html for the page"));
}

}  // namespace
}  // namespace zeropage::profile::report_test
