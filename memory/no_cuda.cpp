#include "memory/device_memory.h"
#include "memory/expandable_segments.h"
#include "zeropage/check.h"

namespace zeropage::memory {
namespace {

[[noreturn]] void refuse() {
  ZP_THROW(
      "this build of Zeropage has no CUDA; build the preset cuda (cmake --preset cuda), or train "
      "on the host");
}

}  // namespace

void observe_cuda_memory() {
  refuse();
}
void prefer_expandable_segments() {
  refuse();
}
bool uses_expandable_segments() {
  refuse();
}
void limit_cuda_memory(c10::Device /*device*/, int64_t /*bytes*/, int64_t /*total_bytes*/) {
  refuse();
}
int64_t cuda_reserved_bytes(c10::Device /*device*/) {
  refuse();
}
void record_cuda_memory_history(int64_t /*most_events*/) {
  refuse();
}
void write_cuda_memory_snapshot(const std::string& /*path*/) {
  refuse();
}

}  // namespace zeropage::memory
