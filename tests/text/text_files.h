// What tests of text/ share: a scratch folder, files of known bytes, and what is said when they are refused. Free of
// torch.
#pragma once

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "zeropage/text/text_error.h"

namespace zeropage::testing {

// A folder that is gone with the object.
class TextScratch {
 public:
  TextScratch() { std::filesystem::create_directories(path_); }
  ~TextScratch() { std::filesystem::remove_all(path_); }
  TextScratch(const TextScratch&) = delete;
  TextScratch& operator=(const TextScratch&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  // The path of a new file with these bytes.
  std::filesystem::path put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }

 private:
  static std::string next_name() {
    static std::atomic<int> made = 0;
    return "zeropage-text-" + std::to_string(::getpid()) + "-" + std::to_string(made++);
  }
  const std::filesystem::path path_ = std::filesystem::temp_directory_path() / next_name();
};

inline std::string text_in(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// What `run` throws as a TextError; "" if nothing. Other exceptions fail the test.
template <typename Run>
std::string text_error_of(const Run& run) {
  try {
    run();
  } catch (const text::TextError& error) {
    return error.what();
  }
  return "";
}

template <typename T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

}  // namespace zeropage::testing
