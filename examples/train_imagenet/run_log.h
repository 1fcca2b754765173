// A run's log: a file with times, and the terminal without. By spdlog, which needs another fmt than LibTorch brings, so its source is
// compiled apart and this header names neither.
//
// Throws std::runtime_error where the file cannot be opened. Threads: any.
#pragma once

#include <memory>
#include <string>

namespace train_imagenet {

class RunLog {
 public:
  // Adds to the file.
  explicit RunLog(const std::string& file);
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  void to_file(const std::string& line);
  void to_terminal(const std::string& line);

 private:
  struct Loggers;

  const std::unique_ptr<Loggers> loggers_;
};

}  // namespace train_imagenet
