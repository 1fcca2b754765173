#include "profile/report/profile_file.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"

namespace zeropage::profile::profile_file_test {
namespace {

using ::testing::HasSubstr;
using zeropage::testing::error_of;

// A profile with one of everything.
Profile sample() {
  StepProfile step{.step = 4,
                   .label = "a step",
                   .duration_ns = 2'000'000,
                   .before = {{100, 20}, {0, 0}},
                   .changes = {},
                   .pages = {},
                   .spans = {},
                   .held = {},
                   .resident = {2}};
  step.changes.push_back({.time_ns = 10,
                          .bytes = 64,
                          .account = 0,
                          .kind = 1,
                          .kind_before = 1,
                          .phase = Change::Phase::kForward,
                          .owner = 1,
                          .page = 2,
                          .block = 7});
  step.changes.push_back(
      {.time_ns = 20, .bytes = 64, .kind = 0, .kind_before = 1, .owner = 1, .page = 2, .block = 7});
  step.pages.push_back(
      {.time_ns = 5, .what = PageRecord::What::kResident, .page = 2, .pages = 3, .bytes = 4096});
  step.spans.push_back({.begin_ns = 1,
                        .end_ns = 4,
                        .what = SpanRecord::What::kCollective,
                        .name = 4,
                        .of = 2,
                        .bytes = 4096,
                        .on_training_thread = true});
  step.held.push_back({.account = 0, .kind = 0, .owner = 1, .page = 2, .bytes = 64, .blocks = 1});
  Profile profile{.title = "A run with \"quotes\" and </script>",
                  .facts = {{"stage", "3"}},
                  .kinds = {"parameter", "activation"},
                  .accounts = {"host", "nvme tier"},
                  .device = 0,
                  .ranks = {}};
  profile.ranks.push_back({.rank = 0,
                           .names = {"", "aten::mm", "blocks.1", "parameter", "all_gather"},
                           .formula = {100, 0},
                           .steps = {step}});
  profile.ranks.push_back({.rank = 1, .names = {""}, .formula = {}, .steps = {}});
  return profile;
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
}

std::string error_for(const std::string& text) {
  return error_of([&] { parse_profile(text, "run.json"); });
}

TEST(ProfileFileTest, ReadsWhatItWrote) {
  EXPECT_EQ(parse_profile(to_json(sample()), "run.json"), sample());
}

TEST(ProfileFileTest, AnotherVersionIsRefused) {
  EXPECT_EQ(error_for(replaced(to_json(sample()), "\"version\":1", "\"version\":2")),
            "run.json: a profile of version 2, but this program reads version 1; use the zp of the "
            "Zeropage that wrote it");
}

TEST(ProfileFileTest, ACutFileIsRefusedWhereverItIsCut) {
  const std::string text = to_json(sample());
  // The last byte ends the line.
  for (size_t bytes = 1; bytes + 1 < text.size(); ++bytes) {
    EXPECT_THAT(error_for(text.substr(0, bytes)), HasSubstr("the file ends in the middle, after"))
        << bytes;
  }
}

TEST(ProfileFileTest, WhatIsNoProfileIsRefused) {
  EXPECT_THAT(error_for("# a log"), HasSubstr("run.json: not a profile: no JSON from byte 1 on"));
  EXPECT_THAT(error_for("{\"loss\": [1]}"), HasSubstr("not a profile: expected JSON whose"));
  EXPECT_THAT(error_for("[]"), HasSubstr("not a profile: expected JSON whose"));
}

TEST(ProfileFileTest, WhatContradictsItselfIsRefused) {
  const std::string text = to_json(sample());
  EXPECT_THAT(error_for(replaced(text, "\"block\":[7,7]", "\"block\":[7]")),
              HasSubstr("\"block\" has 1 values, but its table has 2 rows"));
  EXPECT_THAT(error_for(replaced(text, "\"owner\":[1,1]", "\"owner\":[1,99]")),
              HasSubstr("\"owner\": expected a number from 0 to 4, got 99"));
  EXPECT_THAT(error_for(replaced(text, "\"kind\":[1,0]", "\"kind\":[1,\"x\"]")),
              HasSubstr("\"kind\": expected a whole number, got \"x\""));
  EXPECT_THAT(error_for(replaced(text, "[100,20]", "[100]")),
              HasSubstr("\"before\": expected 2 numbers, one a kind"));
  EXPECT_THAT(error_for(replaced(text, "\"step\":4", "\"stop\":4")),
              HasSubstr("expected a field \"step\""));
  EXPECT_THAT(error_for(replaced(text, "\"device\":0", "\"device\":2")),
              HasSubstr("\"device\": expected a number from 0 to 1, got 2"));
}

TEST(ProfileFileTest, AFileThatIsNotThereAndAFolderThatIsNotThere) {
  EXPECT_THAT(error_of([] { read_profile("/nowhere/run.json"); }),
              HasSubstr("/nowhere/run.json: cannot be read"));
  EXPECT_THAT(error_of([] { write_text("/nowhere/run.json", "x"); }),
              HasSubstr("/nowhere/run.json: cannot be written"));
}

}  // namespace
}  // namespace zeropage::profile::profile_file_test
