// What the loops may use of the processor; the bits are the same. Free of torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

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

namespace zeropage::optim::cpu {

// Each set contains those before it.
enum class Instructions : uint8_t {
  kAnyProcessor,
  kAvx2,    // AVX2 and FMA
  kAvx512,  // F, BW, DQ and VL
};

// What the variable below calls it: default, avx2 or avx512, as LibTorch's ATEN_CPU_CAPABILITY does.
std::string_view name_of(Instructions instructions);

// The best that this processor has and the operating system keeps.
Instructions instructions_of_processor();

// The set of that name. Throws std::invalid_argument where `text` is no name, or the name of more than
// `most`, which the processor has.
Instructions instructions_named(std::string_view text, Instructions most);

// What loops use: the processor's, or the set that ZEROPAGE_CPU_CAPABILITY names. The variable is read once,
// by the first call that succeeds; others throw as instructions_named() does. From any thread.
Instructions best_instructions();

// No more than `most`, and no more than loops use.
inline Instructions usable(Instructions most) {
  return std::min(most, best_instructions());
}

}  // namespace zeropage::optim::cpu
