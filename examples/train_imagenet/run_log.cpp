#include "train_imagenet/run_log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <stdexcept>

namespace train_imagenet {
namespace {

std::unique_ptr<spdlog::logger> logger(const std::string& name, spdlog::sink_ptr sink,
                                       const std::string& pattern) {
  sink->set_pattern(pattern);
  auto made = std::make_unique<spdlog::logger>(name, std::move(sink));
  made->flush_on(spdlog::level::info);
  return made;
}

}  // namespace

struct RunLog::Loggers {
  std::unique_ptr<spdlog::logger> file, terminal;
};

RunLog::RunLog(const std::string& file) : loggers_(std::make_unique<Loggers>()) {
  try {
    loggers_->file = logger("file", std::make_shared<spdlog::sinks::basic_file_sink_mt>(file),
                            "%Y-%m-%d %H:%M:%S %v");
  } catch (const spdlog::spdlog_ex& error) {
    throw std::runtime_error(file + ": the log cannot be opened: " + error.what());
  }
  loggers_->terminal = logger("terminal", std::make_shared<spdlog::sinks::stdout_sink_mt>(), "%v");
}

RunLog::~RunLog() = default;

void RunLog::to_file(const std::string& line) {
  loggers_->file->info(line);
}

void RunLog::to_terminal(const std::string& line) {
  loggers_->terminal->info(line);
}

}  // namespace train_imagenet
