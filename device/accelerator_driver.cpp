#include "device/accelerator_driver.h"

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <system_error>

namespace zeropage::device {
namespace {

struct DriverNote {
  std::mutex mutex;
  std::string who;  // guarded by mutex
};

DriverNote& driver_note() {
  static DriverNote note;
  return note;
}

// A file of this process whose name begins so; "" if none is open.
std::string open_file_that_begins(const std::string& name) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    // Descriptors close while they are listed.
    const std::string file = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (file.starts_with(name)) return file;
  }
  return "";
}

}  // namespace

void note_driver_use(const std::string& who) {
  const std::lock_guard lock(driver_note().mutex);
  if (driver_note().who.empty()) driver_note().who = who;
}

void note_driver_question(const std::string& who) {
  if (std::getenv("ZEROPAGE_STRICT_FORK") != nullptr) note_driver_use(who);
}

std::string driver_use(const std::string& file) {
  {
    const std::lock_guard lock(driver_note().mutex);
    if (!driver_note().who.empty()) return driver_note().who + " asked it";
  }
  const std::string open = open_file_that_begins(file);
  return open.empty() ? "" : "the process has " + open + " open, which CUDA opens when it starts";
}

}  // namespace zeropage::device
