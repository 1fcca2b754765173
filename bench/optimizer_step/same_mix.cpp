#include "bench/optimizer_step/same_mix.h"

#include "optim/cpu/instructions.h"
#include "optim/rounded.h"

namespace optimizer_step {
namespace {

using zeropage::optim::cpu::Instructions;

ZEROPAGE_ELEMENT void touch(const SameMix& mix, int64_t begin, int64_t end) {
  const SameMix own = mix;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    own.values[i] = own.values[i] * own.one + own.gradient[i] * own.zero;
    own.states[0][i] *= own.one;
    own.states[1][i] *= own.one;
  }
}

void touch_with_any(const SameMix& mix, int64_t begin, int64_t end) {
  touch(mix, begin, end);
}

ZEROPAGE_AVX2 void touch_with_avx2(const SameMix& mix, int64_t begin, int64_t end) {
  touch(mix, begin, end);
}

ZEROPAGE_AVX512 void touch_with_avx512(const SameMix& mix, int64_t begin, int64_t end) {
  touch(mix, begin, end);
}

}  // namespace

void touch_on_cpu(const SameMix& mix, int64_t begin, int64_t end) {
  switch (zeropage::optim::cpu::best_instructions()) {
    case Instructions::kAvx512:
      return touch_with_avx512(mix, begin, end);
    case Instructions::kAvx2:
      return touch_with_avx2(mix, begin, end);
    case Instructions::kAnyProcessor:
      return touch_with_any(mix, begin, end);
  }
}

}  // namespace optimizer_step
