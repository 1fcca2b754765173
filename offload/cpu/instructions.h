// What the loops may use of the processor; the bits are the same. Free of torch.
#pragma once

#include <algorithm>
#include <cstdint>

// A function of that instruction set. It inlines what is always inlined (rounded.h), which so takes
// the set of its caller. Elsewhere than on x86-64 these are sets like any other.
#if defined(__x86_64__)
#define ZEROPAGE_AVX2 __attribute__((target("avx2,fma")))
#define ZEROPAGE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define ZEROPAGE_AVX2
#define ZEROPAGE_AVX512
#endif

// The pointers of the next loop do not overlap: all that a compiler asks to make vectors of it.
#if defined(__clang__)
#define ZEROPAGE_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define ZEROPAGE_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace zeropage::offload::cpu {

// Each set contains those before it.
enum class Instructions : uint8_t {
  kAnyProcessor,
  kAvx2,    // AVX2 and FMA
  kAvx512,  // F, BW, DQ and VL
};

// The best that this processor has and the operating system keeps.
inline Instructions best_instructions() {
#if defined(__x86_64__)
  static const Instructions best = [] {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
      return Instructions::kAnyProcessor;
    }
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has_avx512 ? Instructions::kAvx512 : Instructions::kAvx2;
  }();
  return best;
#else
  return Instructions::kAnyProcessor;
#endif
}

// No more than `most`, and no more than there is.
inline Instructions usable(Instructions most) {
  return std::min(most, best_instructions());
}

}  // namespace zeropage::offload::cpu
