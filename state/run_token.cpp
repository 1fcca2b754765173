#include "state/run_token.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <fcntl.h>
#include <random>
#include <sys/file.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::state {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMostTokenBytes = 4096;
// Records are as long as each other, as long as host names allow. So a new one takes the place of the one before by one
// write, and a process that is killed, or a full disk, leaves one of the two and no empty file.
constexpr size_t kTokenBytes = 512;
constexpr auto kBetweenTries = std::chrono::milliseconds(10);

// What a run wrote, as far as it can be read: a power cut may leave anything.
json record_of(const std::string& text) {
  json record = json::parse(text, nullptr, /*allow_exceptions=*/false);
  return record.is_object() ? record : json::object();
}

int64_t number_in(const json& record) {
  const auto number = record.find("run");
  return number != record.end() && number->is_number_integer() ? number->get<int64_t>() : 0;
}

std::string text_in(const json& record, const char* key) {
  const auto value = record.find(key);
  if (value == record.end()) return "unknown";
  return value->is_string() ? value->get<std::string>() : value->dump();
}

std::string words_of(const json& record) {
  return "run " + std::to_string(number_in(record)) + " (host " + text_in(record, "host") +
         ", process " + text_in(record, "process") + ", since " + text_in(record, "since") + ")";
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

std::string text_of(const json& record) {
  std::string text = record.dump();
  text.resize(std::max(text.size(), kTokenBytes - 1), ' ');
  return text + "\n";
}

// Two tokens are never alike, though a damaged file may begin the numbers anew.
json record_of_this_run(int64_t number) {
  std::random_device random;
  return {{"host", host_name()},
          {"process", ::getpid()},
          {"run", number},
          {"since", time_now()},
          {"unique", (uint64_t{random()} << 32) | random()}};
}

bool is_of_this_process(const json& record) {
  return text_in(record, "host") == host_name() &&
         text_in(record, "process") == std::to_string(::getpid());
}

[[noreturn]] void throw_taken(const fs::path& folder, const json& own, const json& taken_by) {
  const std::string what_to_do =
      is_of_this_process(taken_by)
          ? "Both are of this process: make one StateSaver for a folder, or give each its own."
          : "If that is this job, started again, let this run end; if not, give each run a folder "
            "of its own.";
  throw StateError(folder.string(), 0,
                   words_of(own) + " has lost this folder to " + words_of(taken_by) +
                       ", which took it over since, and saves nothing more here. The states of " +
                       "the newer run were left as they are. " + what_to_do);
}

}  // namespace

RunToken::Hold::Hold(const fs::path& file, std::chrono::milliseconds longest_wait) : file_(file) {
  descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0) throw_call_failed(file, "open", errno);
  try {
    lock(longest_wait);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

// The lock goes by itself with the last copy of the descriptor, of which a process that was forked meanwhile has one.
RunToken::Hold::~Hold() {
  ::flock(descriptor_, LOCK_UN);
  ::close(descriptor_);
}

void RunToken::Hold::lock(std::chrono::milliseconds longest_wait) {
  const auto give_up_at = std::chrono::steady_clock::now() + longest_wait;
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == ENOLCK || errno == ENOSYS || errno == EOPNOTSUPP) {
      note_ =
          file_.string() +
          ": its file system has no locks, so a run that is started just while this one saves is "
          "not noticed until the next save";
      return;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) throw_call_failed(file_, "flock", errno);
    if (std::chrono::steady_clock::now() >= give_up_at) {
      throw StateError(file_.string(), 0,
                       "has been locked for " + std::to_string(longest_wait.count()) + " ms by " +
                           words_of(record_of(read())) +
                           " or by one that takes the folder over; is that process stopped, or its "
                           "host cut off? "
                           "End it, then start again");
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
}

std::string RunToken::Hold::read() const {
  std::string text(kMostTokenBytes, '\0');
  ssize_t bytes = -1;
  do {
    bytes = ::pread(descriptor_, text.data(), text.size(), 0);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) throw_call_failed(file_, "pread", errno);
  text.resize(static_cast<size_t>(bytes));
  return text;
}

void RunToken::Hold::write(const std::string& text) const {
  for (size_t done = 0; done < text.size();) {
    const ssize_t bytes =
        ::pwrite(descriptor_, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) throw_call_failed(file_, "pwrite", errno);
    done += static_cast<size_t>(bytes);
  }
  if (::ftruncate(descriptor_, static_cast<off_t>(text.size())) != 0) {
    throw_call_failed(file_, "ftruncate", errno);
  }
  while (::fsync(descriptor_) != 0) {
    if (errno != EINTR) throw_call_failed(file_, "fsync", errno);
  }
}

RunToken::RunToken(const fs::path& folder, std::chrono::milliseconds longest_wait)
    : folder_(fs::absolute(folder).lexically_normal()), longest_wait_(longest_wait) {
  make_folders(folder_);
  const Hold held(folder_ / kRunTokenFile, longest_wait_);
  number_ = number_in(record_of(held.read())) + 1;
  text_ = text_of(record_of_this_run(number_));
  held.write(text_);
}

std::string RunToken::words() const {
  return words_of(record_of(text_));
}

std::unique_ptr<const RunToken::Hold> RunToken::hold() const {
  make_folders(folder_);
  auto held = std::make_unique<const Hold>(folder_ / kRunTokenFile, longest_wait_);
  const std::string found = held->read();
  if (found.empty()) {
    held->write(text_);
  } else if (found != text_) {
    throw_taken(folder_, record_of(text_), record_of(found));
  }
  return held;
}

}  // namespace zeropage::state
