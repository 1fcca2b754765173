#include "offload/detail/host_room.h"

#include <fstream>
#include <string>

#include "zeropage/check.h"

namespace zeropage::offload::detail {

int64_t available_host_bytes() {
  std::ifstream lines("/proc/meminfo");
  for (std::string word; lines >> word;) {
    int64_t kibibytes = 0;
    if (word == "MemAvailable:" && lines >> kibibytes) return kibibytes * 1024;
  }
  ZP_THROW(
      "/proc/meminfo has no line \"MemAvailable:\"; mount /proc, or say how much host memory "
      "records may take (host_bytes_allowed)");
}

}  // namespace zeropage::offload::detail
