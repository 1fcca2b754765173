// train_gpt, run as users run it. TRAIN_GPT is its path; so is the variable of that name, which binaries
// that were carried elsewhere need.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/harness/warm_program.h"

namespace zeropage::testing {

inline std::string train_gpt_program() {
  const char* const elsewhere = std::getenv("TRAIN_GPT");
  return elsewhere == nullptr ? TRAIN_GPT : elsewhere;
}

inline Outcome train_gpt(const std::string& flags) {
  return run_program(train_gpt_program() + " " + flags);
}

inline std::string text_in(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

class TrainGptTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  nlohmann::json json() const { return nlohmann::json::parse(std::ifstream(path("out.json"))); }

  // A model that trains in well under a second.
  std::string tiny(const std::string& more) const {
    return "--d-model 32 --layers 2 --heads 2 --sequence 32 --batch 2 --steps 3 --threads 1 "
           "--json " +
           path("out.json") + " " + more;
  }

  // What such a run writes.
  nlohmann::json run(const std::string& flags) const {
    const Outcome outcome = train_gpt(tiny(flags));
    EXPECT_EQ(outcome.exit_code, 0) << flags << "\n" << outcome.output;
    return json();
  }

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() /
                                        ("zeropage-train-gpt-test-" + std::to_string(::getpid()));
};

inline void expect_refused(const Outcome& outcome, const std::string& words) {
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_THAT(outcome.output, ::testing::HasSubstr(words));
  EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
}

}  // namespace zeropage::testing
