#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/schedule/simulation.h"
#include "zeropage/schedule.h"

namespace zeropage::pipeline::timeline_json_test {
namespace {

using testing::HasSubstr;

const parallel::ActionLists kLists = parallel::Interleaved(2).actions(2, 4);

parallel::TimedStep step() {
  return {"interleaved", 2, simulate(kLists, {{0.1, 0.2, 0.3}}).timeline};
}

std::string error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

std::string parse_error(const std::string& text) {
  return error_of([&] { parallel::timed_step(text, "times.json"); });
}

std::string check_error(const parallel::TimedStep& step) {
  return error_of([&] { parallel::check_times(step, kLists, "times.json"); });
}

TEST(TimelineJsonTest, WhatIsWrittenIsReadToTheLastBit) {
  const parallel::TimedStep read = parallel::timed_step(parallel::to_json(step()), "times.json");
  EXPECT_EQ(read.schedule, "interleaved");
  EXPECT_EQ(read.chunks, 2);
  EXPECT_EQ(read.timeline, step().timeline);
  EXPECT_EQ(check_error(read), "no error");
}

TEST(TimelineJsonTest, WhatIsNoTimelineIsRefusedWithThePlace) {
  EXPECT_EQ(parse_error("{"), "times.json: expected JSON, got something else");
  EXPECT_EQ(parse_error("[]"), "times.json: expected an object with \"schedule\"");
  EXPECT_THAT(parse_error(R"({"schedule": 1, "chunks": 1, "ranks": []})"),
              HasSubstr("\"schedule\": expected a schedule's name, got 1"));
  EXPECT_THAT(parse_error(R"({"schedule": "1f1b", "chunks": -1, "ranks": []})"),
              HasSubstr("\"chunks\": expected a whole number from 0 to 1000000, got -1"));
  EXPECT_THAT(parse_error(R"({"schedule": "1f1b", "chunks": 1, "ranks": 2})"),
              HasSubstr("\"ranks\": expected a list for each rank"));
  EXPECT_THAT(parse_error(R"({"schedule": "1f1b", "chunks": 1, "ranks": [2]})"),
              HasSubstr("rank 0: expected a list of actions"));
  const std::string action =
      R"({"schedule": "1f1b", "chunks": 1, "ranks": [[], [{"chunk": 0, "micro_batch": 0, )";
  EXPECT_THAT(parse_error(action + R"("kind": "sideways", "begin_s": 0, "end_s": 1}]]})"),
              HasSubstr("times.json, rank 1, action 0: \"kind\": expected \"forward\""));
  EXPECT_THAT(parse_error(action + R"("kind": "forward", "begin_s": -1, "end_s": 1}]]})"),
              HasSubstr("\"begin_s\": expected seconds, at least 0, got -1"));
  EXPECT_THAT(parse_error(action + R"("kind": "forward", "begin_s": 0}]]})"),
              HasSubstr("rank 1, action 0: expected an object with \"end_s\""));
}

TEST(TimelineJsonTest, TimesOfOtherActionsAreRefused) {
  parallel::TimedStep other = step();
  other.timeline.pop_back();
  EXPECT_THAT(check_error(other), HasSubstr("expected 2 ranks, got 1"));
  other = step();
  other.chunks = 1;
  EXPECT_THAT(check_error(other), HasSubstr("expected 2 chunks, got 1"));
  other = step();
  other.timeline[1].pop_back();
  EXPECT_THAT(check_error(other), HasSubstr("rank 1: expected 16 actions, got 15"));
  other = step();
  other.timeline[0][2].action.chunk = 0;
  EXPECT_THAT(check_error(other),
              HasSubstr("rank 0, action 2: expected the forward of micro-batch 0, chunk 1, got "
                        "the forward of micro-batch 0, chunk 0"));
  other = step();
  other.timeline[0][1].begin_s = 0;
  EXPECT_THAT(check_error(other), HasSubstr("rank 0, action 1: expected it to begin when"));
}

}  // namespace
}  // namespace zeropage::pipeline::timeline_json_test
