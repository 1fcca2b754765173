// The files of a state on disk, as bytes.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace zeropage::testing {

// The bytes of each file of a folder, by name.
inline std::map<std::string, std::string> files_of(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ostringstream bytes;
    bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    files[entry.path().filename().string()] = bytes.str();
  }
  return files;
}

// Two states with an optimizer.
inline void expect_same_files(const std::filesystem::path& state,
                              const std::filesystem::path& other) {
  const auto files = files_of(state), others = files_of(other);
  EXPECT_EQ(files.size(), 3U);
  ASSERT_EQ(files.size(), others.size());
  for (const auto& [name, bytes] : files) {
    EXPECT_TRUE(others.at(name) == bytes) << name << " of " << other;
  }
}

}  // namespace zeropage::testing
