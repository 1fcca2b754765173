#include <fstream>
#include <string>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::memory {
namespace {

int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == key && status >> kibibytes) return kibibytes * 1024;
  }
  ZP_THROW("/proc/self/status has no line \"", key, "\"; mount /proc");
}

}  // namespace

int64_t resident_bytes() {
  return status_bytes("VmRSS:");
}

int64_t peak_resident_bytes() {
  return status_bytes("VmHWM:");
}

void reset_peak_resident_bytes() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace zeropage::memory
