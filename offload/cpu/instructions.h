// What the loops may use of the processor; the bits are the same. Free of torch.
#pragma once

#include <cstdint>

namespace zeropage::offload::cpu {

enum class Instructions : uint8_t {
  kAnyProcessor,
  kVectors,  // AVX2 and FMA; any processor's where it lacks them
};

// Whether they are all there.
inline bool has_vectors() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
#else
  return false;
#endif
}

}  // namespace zeropage::offload::cpu
