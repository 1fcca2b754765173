// train_gpt, run as users run it. TRAIN_GPT is its path; so is the variable of that name, which binaries
// that were carried elsewhere need.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace zeropage::testing {

struct Outcome {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

inline Outcome shell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = ::popen(("{ " + command + " ; } 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), pipe))
    outcome.output.append(buffer, count);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

inline std::string train_gpt_program() {
  const char* const elsewhere = std::getenv("TRAIN_GPT");
  return elsewhere == nullptr ? TRAIN_GPT : elsewhere;
}

inline Outcome train_gpt(const std::string& flags) {
  return shell(train_gpt_program() + " " + flags);
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

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() /
                                        ("zeropage-train-gpt-test-" + std::to_string(::getpid()));
};

inline void expect_refused(const Outcome& outcome, const std::string& words) {
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_THAT(outcome.output, ::testing::HasSubstr(words));
  EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
}

}  // namespace zeropage::testing
