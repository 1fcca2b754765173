// Loaded before LibTorch, it passes itself off as release 1.13.2.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) uint64_t aoti_torch_abi_version() {
  return uint64_t{1} << 56 | uint64_t{13} << 48 | uint64_t{2} << 40;
}
